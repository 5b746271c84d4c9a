"""One training run, sharded on the ranks of a pool or unsharded in one process, to be compared bit for bit."""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import zplan
from tests import models
from zplan.runtime.comm import Comm

STEPS = 4
ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.05, foreach=False)


@dataclass(frozen=True)
class Case:
    """What is trained. Every field can be pickled: ranks build the model themselves."""

    make: Callable[[], torch.nn.Module]
    loss_fn: Callable[..., Any]
    batch: Callable[[int], Any]
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    stages: Mapping[str, int] = field(default_factory=dict)
    steps: int = STEPS


@dataclass(frozen=True)
class Run:
    """What a run gives: losses of each step of one rank, the whole model at the end, and the rank's own buffers."""

    losses: list[torch.Tensor]
    tensors: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def build(case: Case) -> torch.nn.Module:
    torch.manual_seed(0)
    model = case.make()
    for name, stage in case.stages.items():
        zplan.annotate(model.get_submodule(name), stage=stage)
    return model


def seed(step: int, rank: int) -> int:
    """Of dropout, and of the batch: another one on each rank in each step."""
    return 1000 * step + rank


def sharded(comm: Comm, case: Case, options: dict[str, Any]) -> Run:
    """On every rank of a pool."""
    model = build(case)
    step = zplan.compile(
        model, case.loss_fn, case.batch(seed(0, comm.rank)), optimizer=case.optimizer, group=comm.group, **options
    )
    losses = []
    for i in range(case.steps):
        torch.manual_seed(seed(i, comm.rank))
        losses.append(step(case.batch(seed(i, comm.rank))))
    return Run(losses, step.full_state_dict(), dict(model.named_buffers()))


def unsharded(case: Case, world: int) -> list[Run]:
    """One process: a replica for each rank; gradients averaged in rank order, 16 bit in fp32 and rounded once."""
    torch.set_num_threads(1)
    replicas = [build(case)]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(world - 1)]
    trained = [[p for p in replica.parameters() if p.requires_grad] for replica in replicas]
    optimizers = [case.optimizer([(n, p) for n, p in r.named_parameters() if p.requires_grad]) for r in replicas]
    losses: list[list[torch.Tensor]] = [[] for _ in replicas]
    for i in range(case.steps):
        for rank, replica in enumerate(replicas):
            torch.manual_seed(seed(i, rank))
            loss = case.loss_fn(replica, case.batch(seed(i, rank)))
            loss.backward()
            losses[rank].append(loss.detach())
        for shared in zip(*trained, strict=True):
            average = mean_gradient([p.grad for p in shared])
            for parameter in shared:
                parameter.grad = None if average is None else average.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = dict(replicas[0].state_dict())
    return [Run(kept, whole, dict(r.named_buffers())) for kept, r in zip(losses, replicas, strict=True)]


def mean_gradient(grads: list[torch.Tensor | None]) -> torch.Tensor | None:
    if grads[0] is None:
        return None
    total = functools.reduce(torch.add, [g.float() for g in grads])
    return (total / len(grads)).to(grads[0].dtype)


def assert_same(found: Run, expected: Run) -> None:
    """Bit for bit, every loss, every parameter and every buffer."""
    assert list(found.tensors) == list(expected.tensors)
    for i, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert torch.equal(mine, theirs), f"loss of step {i}: {mine} instead of {theirs}"
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found.tensors[name], tensor), f"{name} differs"
    assert list(found.buffers) == list(expected.buffers)
    for name, tensor in expected.buffers.items():
        assert torch.equal(found.buffers[name], tensor), f"this rank's own {name} differs"


def gpt() -> torch.nn.Module:
    return models.GPT(vocab=61, width=24, layers=3, heads=2, context=16, dropout=0.1)


def odd() -> torch.nn.Module:
    return models.OddMLP()


def gpt_batch(seed: int) -> Any:
    return gpt().make_batch(seed)


def odd_batch(seed: int) -> Any:
    return odd().make_batch(seed)


def odd_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return models.OddMLP.loss_fn(model, batch)[0]


def autocast_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return models.GPT.loss_fn(model, batch)


def plain() -> torch.nn.Module:
    return models.GPT(vocab=61, width=24, layers=2, heads=2, context=16, dropout=0.0)


CASES = {
    "gpt": Case(gpt, models.GPT.loss_fn, gpt_batch),
    "odd": Case(odd, odd_loss, odd_batch),
    "plain": Case(plain, models.GPT.loss_fn, gpt_batch),
    "gpt autocast": Case(gpt, autocast_loss, gpt_batch),
    "gpt mixed": Case(gpt, models.GPT.loss_fn, gpt_batch, stages={"embed": 0, "blocks.0": 1, "blocks.2.up": 2}),
    "odd mixed": Case(odd, odd_loss, odd_batch, stages={"twice": 0, "norm": 1, "low": 2, "frozen": 3}),
}
