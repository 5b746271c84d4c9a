"""A training loop with all that stands around a step: micro-batches, clipping, schedulers, several optimizers.

Sharded on the ranks of a pool, and unsharded in one process with a replica for each rank, to be compared bit for bit.
"""

import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import zplan
from tests.ranks.test_micro_batches import batches, over_micro_batches_first, over_ranks_first
from tests.ranks.training import Case, Run, assert_same, build, seed
from zplan.runtime.comm import Comm

# Given an optimizer, and the number of its first group among those of all: what is done after each step with the mean
# loss over ranks.
Schedule = Callable[[torch.optim.Optimizer, int], Callable[[torch.Tensor], None]]


def unscheduled(optimizer: torch.optim.Optimizer, first: int) -> Callable[[torch.Tensor], None]:
    return lambda loss: None


@dataclass(frozen=True)
class Loop:
    """How a case is trained. `case.optimizer` is a factory, or a mapping of patterns to some."""

    case: Case
    micro_batches: int = 1
    clip: float | None = None
    schedule: Schedule = unscheduled


@dataclass(frozen=True)
class Looped:
    """What a loop gives; `options[step]`: of every group, all its numbers."""

    run: Run
    options: list[list[dict[str, Any]]]


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: group[key] for key in group if key not in ("params", "param_names")} for group in optimizer.param_groups
    ]


def sharded(comm: Comm, loop: Loop, options: dict[str, Any]) -> Looped:
    case = loop.case
    model = build(case)
    step = zplan.compile(
        model,
        case.loss_fn,
        case.batch(0),
        optimizer=case.optimizer,
        group=comm.group,
        clip=loop.clip,
        micro_batches=loop.micro_batches,
        **options,
    )
    losses, groups = [], []
    with warnings.catch_warnings():
        # Schedulers that see steps in the wrong order warn.
        warnings.simplefilter("error")
        tick = loop.schedule(step.optimizer, 0)
        for i in range(case.steps):
            torch.manual_seed(seed(i, comm.rank))
            losses.append(step(*batches(case, i, comm.rank, loop.micro_batches)))
            groups.append(options_of(step.optimizer))
            tick(step.mean(losses[-1]))
    return Looped(Run(losses, step.full_state_dict(), dict(model.named_buffers())), groups)


def unsharded(loop: Loop, world: int, make: Any, *, ranks_first: bool = False) -> list[Looped]:
    """`make`: a factory for each replica, of all its trained parameters, that stands for `case.optimizer`."""
    torch.set_num_threads(1)
    case = loop.case
    replicas = [build(case)]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(world - 1)]
    trained = [[(n, p) for n, p in replica.named_parameters() if p.requires_grad] for replica in replicas]
    made = [make(named) for named in trained]
    held = {id(p) for each in made for one in each for group in one.param_groups for p in group["params"]}
    trained = [[(n, p) for n, p in named if id(p) in held] for named in trained]
    ticks = [_ticks(loop, each) for each in made]
    losses: list[list[torch.Tensor]] = [[] for _ in replicas]
    groups = []
    for i in range(case.steps):
        grads = [_gradients(loop, i, rank, replicas[rank], trained[rank], losses[rank]) for rank in range(world)]
        averages: list[torch.Tensor | None] = []
        for index in range(len(trained[0])):
            table = [[micro[index] for micro in of_rank] for of_rank in grads]
            if table[0][0] is None:
                averages.append(None)
                continue
            total = over_ranks_first(table) if ranks_first and world > 1 else over_micro_batches_first(table)
            averages.append((total / (world * loop.micro_batches)).to(table[0][0].dtype))
        if loop.clip is not None:
            clip_in_fp64([average for average in averages if average is not None], loop.clip)
        groups.append([option for optimizer in made[0] for option in options_of(optimizer)])
        mean = functools.reduce(torch.add, [of_rank[-1] for of_rank in losses]) / world
        for named, optimizers, tick in zip(trained, made, ticks, strict=True):
            for (_, parameter), average in zip(named, averages, strict=True):
                parameter.grad = None if average is None else average.clone()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for each in tick:
                each(mean)
    whole = dict(replicas[0].state_dict())
    runs = [Run(kept, whole, dict(r.named_buffers())) for kept, r in zip(losses, replicas, strict=True)]
    return [Looped(run, groups) for run in runs]


def _ticks(loop: Loop, optimizers: list[torch.optim.Optimizer]) -> list[Callable[[torch.Tensor], None]]:
    first = itertools.accumulate((len(each.param_groups) for each in optimizers), initial=0)
    return [loop.schedule(each, number) for each, number in zip(optimizers, first, strict=False)]


def _gradients(loop: Loop, i: int, rank: int, model: torch.nn.Module, named: list, losses: list) -> list:
    """Of each micro-batch, of each parameter."""
    torch.manual_seed(seed(i, rank))
    found, each = [], []
    for batch in batches(loop.case, i, rank, loop.micro_batches):
        loss = loop.case.loss_fn(model, batch)
        loss.backward()
        each.append(loss.detach())
        found.append([p.grad for _, p in named])
        for _, p in named:
            p.grad = None
    losses.append(each[0] if len(each) == 1 else torch.stack(each).mean())
    return found


def clip_in_fp64(grads: list[torch.Tensor], clip: float) -> None:
    """By the norm in fp64, which zplan takes too; torch's own, in the gradients' dtype, is that up to rounding."""
    norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
    scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale)


def assert_same_loop(found: Looped, expected: Looped) -> None:
    """Bit for bit what was trained, and in every step the same options of every group."""
    for i, (mine, theirs) in enumerate(zip(found.options, expected.options, strict=True)):
        assert mine == theirs, f"groups at step {i}"
    assert_same(found.run, expected.run)
