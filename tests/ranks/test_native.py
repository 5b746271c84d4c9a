"""The collectives that NCCL would run (reduce-scatter and all-reduce of the backend itself), run on gloo.

Two ranks: a sum of two terms has one order, so the bits are those of every other way.
"""

from dataclasses import replace

import pytest
import torch

from tests.ranks import test_precision as precise
from tests.ranks.test_micro_batches import SGD, batches
from tests.ranks.training import CASES, STEPS, Run, assert_same, build, seed, unsharded
from zplan.graph.lift import dtype_of
from zplan.graph.optimizer import groups_of
from zplan.graph.trace import trace
from zplan.planner.plan import make_plan
from zplan.planner.program import AllReduce
from zplan.planner.spec import make_spec
from zplan.runtime.comm import Comm
from zplan.runtime.state import State
from zplan.runtime.step import TrainStep

# AdamW divides gradients by their own size, and would hide a factor.
BY_SGD = replace(CASES["plain"], optimizer=SGD)


def train(
    comm: Comm, name: str, stage: int, precision: object = None, micro_batches: int = 1, sgd: bool = False
) -> Run:
    case = BY_SGD if sgd else CASES[name]
    model = build(case)
    spec = make_spec(
        stage=stage, world_size=2, bucket=4_000, device="cuda", precision=precision, micro_batches=micro_batches
    )
    traced = trace(model, case.loss_fn, case.batch(0), optimizer=case.optimizer, precision=spec.precision)
    plan = make_plan(traced.graph, spec)
    assert any(isinstance(x, AllReduce) for x in plan.program.instructions) == (stage == 0)
    held = {tensor.name: dtype_of(tensor.held) for tensor in traced.graph.tensors}
    optimizer = groups_of(case.optimizer, model, held=held)[0]
    step = TrainStep(plan, traced, State(model, plan.ownership, comm, sync=True), optimizer, comm)
    given = [[case.batch(seed(i, comm.rank))] for i in range(STEPS)]
    if precision is not None:
        given = [batches(case, i, comm.rank, micro_batches) for i in range(STEPS)]
    losses = [step(*each) for each in given]
    return Run(losses, step.full_state_dict(), dict(model.named_buffers()))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_native_reductions_give_the_same_bits(pool, stage: int) -> None:
    for run, reference in zip(pool.run(2, train, "plain", stage), unsharded(CASES["plain"], 2), strict=True):
        assert_same(run, reference)


@pytest.mark.parametrize(
    ("dtype", "stage", "micro_batches"),
    [("bf16", 0, 1), ("bf16", 3, 1), ("fp16", 0, 1), ("fp16", 2, 1), ("fp16", 1, 2)],
)
def test_native_reductions_in_16_bit_give_the_same_bits(pool, dtype: str, stage: int, micro_batches: int) -> None:
    """A sum of two, rounded to 16 bit and halved, has the bits of the fp32 sum that is halved and rounded; in fp16 each
    term is halved first, which is exact while nothing is subnormal."""
    ask = precise.Ask(dtype)
    reference = precise.unsharded(CASES["plain"], ask, 2, micro_batches, ranks_first=stage >= 2)
    runs = pool.run(2, train, "plain", stage, ask.precision, micro_batches)
    for run, expected in zip(runs, reference, strict=True):
        assert_same(run, expected)


@pytest.mark.parametrize(("dtype", "stage"), [("fp16", 2), ("fp16", 3), ("bf16", 3), ("fp16", 0)])
def test_native_reductions_in_16_bit_over_micro_batches_divide_once(pool, dtype: str, stage: int) -> None:
    """Near, as a backend rounds the sum of two ranks to 16 bit, 2^-8 of it at most, where the loop by hand does not."""
    ask = precise.Ask(dtype)
    reference = precise.unsharded(BY_SGD, ask, 2, 2, ranks_first=stage >= 2)
    before = build(BY_SGD).state_dict()
    for run, expected in zip(pool.run(2, train, "plain", stage, ask.precision, 2, True), reference, strict=True):
        moved = [(run.tensors[name] - before[name]).flatten() for name in before]
        should = [(expected.tensors[name] - before[name]).flatten() for name in before]
        apart = (torch.cat(moved) - torch.cat(should)).norm() / torch.cat(should).norm()
        assert apart < 0.02
