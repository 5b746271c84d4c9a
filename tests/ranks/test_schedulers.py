"""torch's own schedulers on `step.optimizer`: the bits of the same schedulers on an unsharded loop."""

import dataclasses
import functools
import math

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

from tests.ranks.loops import Loop, assert_same_loop, sharded, unsharded
from tests.ranks.training import CASES


def groups(named: list, kind: type, **options) -> optim.Optimizer:
    """By name and shape: biases, other vectors and scalars, matrices."""
    biases = [p for n, p in named if n.endswith("bias")]
    small = [p for n, p in named if not n.endswith("bias") and p.ndim < 2]
    return kind(
        [
            {"params": biases, "weight_decay": 0.0},
            {"params": small, "lr": 0.02},
            {"params": [p for n, p in named if not n.endswith("bias") and p.ndim >= 2]},
        ],
        lr=0.05,
        weight_decay=0.1,
        foreach=False,
        **options,
    )


SGD = functools.partial(groups, kind=optim.SGD, momentum=0.9)
ADAMW = functools.partial(groups, kind=optim.AdamW)


def sequence(optimizer: optim.Optimizer) -> schedulers.LRScheduler:
    warm = schedulers.LinearLR(optimizer, start_factor=0.25, total_iters=2)
    return schedulers.SequentialLR(optimizer, [warm, schedulers.ExponentialLR(optimizer, 0.5)], milestones=[2])


def chain(optimizer: optim.Optimizer) -> schedulers.LRScheduler:
    return schedulers.ChainedScheduler([schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.7)])


def plateau(optimizer: optim.Optimizer) -> schedulers.ReduceLROnPlateau:
    """Of a loss that must get much better than it can: every second step is a plateau."""
    return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.9, min_lr=[1e-5, 2e-5, 3e-5])


ALL = (
    lambda it: schedulers.LambdaLR(it, [lambda e: 0.9**e, lambda e: 1 / (1 + e), lambda e: math.cos(e / 4)]),
    lambda it: schedulers.MultiplicativeLR(it, lambda e: 1.2),
    lambda it: schedulers.StepLR(it, 2, gamma=0.5),
    lambda it: schedulers.MultiStepLR(it, [1, 3], gamma=0.5),
    lambda it: schedulers.CosineAnnealingLR(it, 4),
    lambda it: schedulers.PolynomialLR(it, 6, power=2.0),
    lambda it: schedulers.CosineAnnealingWarmRestarts(it, 2, T_mult=2),
    lambda it: schedulers.OneCycleLR(it, [0.1, 0.02, 0.05], total_steps=4, base_momentum=0.7),
    lambda it: schedulers.CyclicLR(it, 0.01, 0.05, step_size_up=2, base_momentum=0.6, cycle_momentum=True),
    sequence,
    chain,
    plateau,
)
STEPS = 4


def one_after_another(optimizer: optim.Optimizer, first: int):
    """Each of them for a few steps, on what the one before has left, from the first rates anew."""
    state = {"steps": 0, "scheduler": ALL[0](optimizer)}

    def tick(loss: torch.Tensor) -> None:
        scheduler = state["scheduler"]
        scheduler.step(loss.item()) if scheduler.__class__ is schedulers.ReduceLROnPlateau else scheduler.step()
        state["steps"] += 1
        if state["steps"] % STEPS == 0 and state["steps"] < STEPS * len(ALL):
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"]
            state["scheduler"] = ALL[state["steps"] // STEPS](optimizer)

    return tick


def loop(name: str, optimizer, steps: int) -> Loop:
    return Loop(dataclasses.replace(CASES[name], optimizer=optimizer, steps=steps), schedule=one_after_another)


@functools.cache
def expected(name: str, optimizer, world: int):
    return unsharded(loop(name, optimizer, STEPS * len(ALL)), world, lambda named: [optimizer(named)])


@pytest.mark.parametrize(("name", "optimizer"), [("plain", SGD), ("odd", ADAMW)], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("stage", range(4))
def test_schedulers_give_the_bits_of_an_unsharded_loop(pool, name, optimizer, stage) -> None:
    runs = pool.run(2, sharded, loop(name, optimizer, STEPS * len(ALL)), {"stage": stage, "bucket": 4_000})
    for found, reference in zip(runs, expected(name, optimizer, 2), strict=True):
        assert_same_loop(found, reference)


@pytest.mark.parametrize(("name", "optimizer"), [("plain", SGD), ("odd", ADAMW)], ids=["SGD", "AdamW"])
def test_every_scheduler_moves_every_group(name, optimizer) -> None:
    """Else the tests above would show nothing."""
    options = expected(name, optimizer, 2)[0].options
    for index in range(len(ALL)):
        steps = options[index * STEPS : (index + 1) * STEPS]
        for group in range(3):
            assert len({step[group]["lr"] for step in steps}) > 1, f"scheduler {index}, group {group}"
    moved = "momentum" if optimizer is SGD else "betas"
    for index in (7, 8):
        assert len({str(step[0][moved]) for step in options[index * STEPS : (index + 1) * STEPS]}) > 1
    assert all("initial_lr" in group for group in options[0])
