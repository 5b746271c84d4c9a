"""The collectives that NCCL would run (reduce-scatter and all-reduce of the backend itself), run on gloo.

Two ranks: a sum of two terms has one order, so the bits are those of every other way.
"""

import pytest

from tests.ranks.training import CASES, STEPS, Run, assert_same, build, seed, unsharded
from zplan.graph.optimizer import groups_of
from zplan.graph.trace import trace
from zplan.planner.plan import make_plan
from zplan.planner.program import AllReduce
from zplan.planner.spec import make_spec
from zplan.runtime.comm import Comm
from zplan.runtime.state import State
from zplan.runtime.step import TrainStep


def train(comm: Comm, name: str, stage: int) -> Run:
    case = CASES[name]
    model = build(case)
    spec = make_spec(stage=stage, world_size=2, bucket=4_000, device="cuda")
    traced = trace(model, case.loss_fn, case.batch(0), optimizer=case.optimizer)
    plan = make_plan(traced.graph, spec)
    assert any(isinstance(x, AllReduce) for x in plan.program.instructions) == (stage == 0)
    optimizer = groups_of(case.optimizer, model)[0]
    step = TrainStep(plan, traced, State(model, plan.ownership, comm, sync=True), optimizer, comm)
    losses = [step(case.batch(seed(i, comm.rank))) for i in range(STEPS)]
    return Run(losses, step.full_state_dict(), dict(model.named_buffers()))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_native_reductions_give_the_same_bits(pool, stage: int) -> None:
    for run, reference in zip(pool.run(2, train, "plain", stage), unsharded(CASES["plain"], 2), strict=True):
        assert_same(run, reference)
