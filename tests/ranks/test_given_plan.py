"""compile(plan=...): a plan that was made before, or its file, runs as it was printed, or says what differs."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zplan
from tests.ranks.training import CASES, STEPS, Case, Run, assert_same, build, seed, unsharded
from zplan.runtime.comm import Comm


def planned(case: Case, model: nn.Module | None = None, batch: Any = None, **options: Any) -> zplan.Plan:
    given = {"world_size": 2, "stage": 3, "bucket": 4_000, **options}
    batch = case.batch(0) if batch is None else batch
    return zplan.plan(model or build(case), case.loss_fn, batch, optimizer=case.optimizer, **given)


def compiled(comm: Comm, case: Case, model: nn.Module | None = None, **options: Any) -> zplan.TrainStep:
    given = {"optimizer": case.optimizer, "group": comm.group, **options}
    return zplan.compile(model or build(case), case.loss_fn, case.batch(0), **given)


def train(comm: Comm, name: str, plan: Any) -> tuple[Run, str, list[str]]:
    case = CASES[name]
    model = build(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = compiled(comm, case, model, plan=plan)
    losses = [step(case.batch(seed(i, comm.rank))) for i in range(STEPS)]
    run = Run(losses, step.full_state_dict(), dict(model.named_buffers()))
    return run, step.plan.hash, [str(each.message) for each in caught if each.category is UserWarning]


@pytest.mark.parametrize("as_file", [True, False])
def test_a_plan_made_before_runs_as_it_was_printed(pool, tmp_path: Path, as_file: bool) -> None:
    plan = planned(CASES["plain"], rules=(zplan.Rule("*", stage=2),))
    plan.save(tmp_path / "plan.json")
    given = str(tmp_path / "plan.json") if as_file else zplan.load_plan(tmp_path / "plan.json")
    found = pool.run(2, train, "plain", given)
    for (run, hash_, warned), reference in zip(found, unsharded(CASES["plain"], 2), strict=True):
        assert_same(run, reference)
        assert hash_ == plan.hash
        assert warned == []


def other_batch(comm: Comm, plan: zplan.Plan, strict: bool) -> tuple[str, list[str], dict[str, int]]:
    """The same model, planned for another batch."""
    case = CASES["plain"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            step = compiled(comm, case, plan=plan, strict=strict)
        except zplan.SpecError as error:
            return str(error), [], {}
    step(case.batch(seed(0, comm.rank)))
    stages = {name: choice.stage for name, choice in step.plan.choices.items()}
    return step.plan.hash, [str(each.message) for each in caught if each.category is UserWarning], stages


def larger(batch: Any) -> Any:
    """The batch twice."""
    return torch.utils._pytree.tree_map(lambda x: torch.cat([x, x]) if isinstance(x, torch.Tensor) else x, batch)


def for_another_batch() -> zplan.Plan:
    case = CASES["plain"]
    rules = (zplan.Rule("*weight", stage=1),)
    return planned(case, batch=larger(case.batch(0)), bucket="25MB", rules=rules)


def test_on_another_graph_of_the_model_decisions_are_lowered_again_and_it_is_said(pool) -> None:
    plan = for_another_batch()
    (hash_, warned, stages), (other, silent, _) = pool.run(2, other_batch, plan, False)
    assert hash_ == other != plan.hash
    assert stages == {name: choice.stage for name, choice in plan.choices.items()}
    assert silent == [], "one rank says it"
    assert warned[0].startswith("the plan was made for another graph of this model\n")
    assert "costs:\n  peak: " in warned[0]
    assert warned[0].endswith("its decisions were kept and lowered again")


def test_strict_refuses_that_on_every_rank(pool) -> None:
    found = pool.run(2, other_batch, for_another_batch(), True)
    assert found[0] == found[1]
    assert found[0][0].startswith("the plan was made for another graph of this model\n")
    assert "strict=True refuses that" in found[0][0]


def refused(comm: Comm, plan: Any, options: dict[str, Any] | None = None) -> str:
    try:
        compiled(comm, CASES["plain"], plan=plan, **(options or {}))
    except zplan.ZplanError as error:
        return f"{type(error).__name__}: {error}"
    return "compiled"


def test_another_model_is_always_refused(pool) -> None:
    case = CASES["plain"]
    model = build(case)
    model.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    plan = planned(case, model)
    one, two = pool.run(2, refused, plan)
    assert one == two
    assert one.startswith(f"SpecError: plan {plan.hash} is of another model\n  extra: fp32[3] in the plan, - here")


def test_another_world_is_refused(pool) -> None:
    plan = planned(CASES["plain"], world_size=64)
    words = pool.run(2, refused, plan)
    assert words == [f"SpecError: plan {plan.hash} is for 64 ranks, and there are 2: plan again for 2"] * 2


def test_options_beside_a_plan_are_refused(pool) -> None:
    words = pool.run(2, refused, planned(CASES["plain"]), {"bucket": "1MB", "prefetch": 2})
    assert words == ["SpecError: bucket, prefetch: a plan says that already; leave either out"] * 2


def test_a_damaged_file_is_refused_on_every_rank(pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned(CASES["plain"]).save(path)
    path.write_text(path.read_text()[:500])
    one, two = pool.run(2, refused, str(path))
    assert one == two
    assert one.startswith(f"SpecError: plan file {path} is cut short or damaged")


def test_the_budget_is_checked_again(pool) -> None:
    """A plan that fits for its own small batch, and does not for the one that is run."""
    case = CASES["plain"]
    small = smaller(case.batch(0))
    peaks = [planned(case, batch=batch).memory.peak_bytes for batch in (small, case.batch(0))]
    assert peaks[0] < peaks[1]
    one, two = pool.run(2, refused, planned(case, batch=small, memory=peaks[1] - 1))
    assert one == two
    assert one.startswith("BudgetError: each rank peaks at ")


def smaller(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x[:1] if isinstance(x, torch.Tensor) and x.dim() else x, batch)


def budget(comm: Comm, memory: int, stage: Any) -> str:
    case = CASES["plain"]
    try:
        step = compiled(comm, case, memory=memory, stage=stage, bucket=4_000)
    except zplan.BudgetError as error:
        return str(error)
    step(case.batch(seed(0, comm.rank)))
    return f"stage {step.plan.stage}"


def test_auto_runs_the_lowest_stage_that_fits_or_every_rank_says_why_not(pool) -> None:
    case = CASES["plain"]
    plans = zplan.plans(build(case), case.loss_fn, case.batch(0), optimizer=case.optimizer, world_size=2, bucket=4_000)
    peaks = [plan.memory.peak_bytes for plan in plans]
    assert pool.run(2, budget, max(peaks), "auto") == ["stage 0"] * 2
    best = peaks.index(min(peaks))
    assert pool.run(2, budget, min(peaks), "auto") == [f"stage {best}"] * 2
    one, two = pool.run(2, budget, min(peaks) - 1, "auto")
    assert one == two
    assert one.startswith("no stage fits: ")


def default_stage(comm: Comm) -> int:
    return compiled(comm, CASES["plain"]).plan.stage


def test_without_stage_or_budget_a_cpu_runs_stage_0(pool) -> None:
    assert pool.run(2, default_stage) == [0, 0]
