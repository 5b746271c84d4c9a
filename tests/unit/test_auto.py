import re
from dataclasses import replace

import pytest

from tests.graphs import Layer, chain_graph
from zplan.errors import BudgetError
from zplan.planner import auto
from zplan.planner.plan import Plan, make_plan
from zplan.planner.spec import Rule, Spec, make_spec

GRAPH = chain_graph([Layer(numel=4096) for _ in range(6)])


def spec(memory: int | None = None, **options) -> Spec:
    return make_spec(**{"world_size": 4, "bucket": 16_384, "memory": memory, **options})


PEAKS = {stage: make_plan(GRAPH, spec(), stage=stage).memory.peak_bytes for stage in range(4)}
LEAST = min(PEAKS.values())


def test_the_graph_tells_stages_apart() -> None:
    assert PEAKS[0] > PEAKS[2] > PEAKS[3]


@pytest.mark.parametrize("below", [0, 1, 100])
@pytest.mark.parametrize("stage", range(4))
def test_the_lowest_stage_that_fits_is_taken(stage: int, below: int) -> None:
    budget = PEAKS[stage] - below
    fitting = [each for each, peak in PEAKS.items() if peak <= budget]
    if not fitting:
        with pytest.raises(BudgetError):
            auto.decide(GRAPH, spec(budget))
        return
    plan = auto.decide(GRAPH, spec(budget))
    assert plan.stage == fitting[0]
    assert plan.memory.peak_bytes <= budget
    assert {each.stage: each.peak_bytes for each in plan.certificates} == PEAKS, "every stage is simulated"
    assert [each.stage for each in plan.certificates if each.fits] == fitting


def test_a_rejected_stage_leaves_a_certificate() -> None:
    plan = auto.decide(GRAPH, spec(PEAKS[3]))
    rejected = plan.certificates[0]
    assert (rejected.stage, rejected.fits, rejected.over) == (0, False, PEAKS[0] - PEAKS[3])
    whole = make_plan(GRAPH, spec(), stage=0)
    assert rejected.where.startswith(f"{whole.memory.peak_index} ")
    assert rejected.alive[0].endswith("optimizer state")
    text = str(plan)
    assert f"auto: stage {plan.stage} is the lowest that fits" in text
    assert f"  stage 0: {rejected.verdict}, peak " in text


def test_without_a_budget_it_is_the_lowest_and_says_so() -> None:
    plan = auto.decide(GRAPH, spec())
    assert plan.stage == 0
    assert "auto: stage 0, the lowest: no memory budget was given" in str(plan)
    assert all(each.fits for each in plan.certificates)


def test_it_is_the_plan_of_its_stage() -> None:
    """All but the words for why."""
    found, plain = auto.decide(GRAPH, spec(PEAKS[3])), make_plan(GRAPH, spec(), stage=3)
    assert (found.program, found.ownership) == (plain.program, plain.ownership)
    assert {choice.because for choice in found.choices.values()} == {"auto: stage 3"}


def test_rules_hold_at_every_stage() -> None:
    rules = (Rule("layers.0.*", stage=3), Rule("layers.1.*", stage=0))
    plan = auto.decide(GRAPH, spec(rules=rules))
    assert [choice.stage for choice in plan.choices.values()] == [3, 0, 0, 0, 0, 0]
    assert plan.certificates[0].peak_bytes < PEAKS[0]


def over(budget: int, **options) -> str:
    with pytest.raises(BudgetError) as caught:
        auto.decide(GRAPH, spec(budget, **options))
    return str(caught.value)


def test_where_nothing_fits_the_error_says_what_is_missing_and_what_would_help() -> None:
    words = over(LEAST - 1)
    lines = words.splitlines()
    assert lines[0].startswith("no stage fits: at stage 3, the best, each rank peaks at ")
    assert " 1 B over its budget of " in lines[0]
    assert lines[1].startswith("--> ")
    assert lines[2].startswith("alive there: ")
    assert [line.split(":")[0] for line in lines[3:7]] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert lines[-1].startswith("try: prefetch 0 (stage ")
    assert "8 ranks (stage 3 peaks at " in lines[-1]


def test_what_is_said_to_help_does() -> None:
    budget = LEAST - 1
    assert "prefetch 0 (" in over(budget)
    assert auto.decide(GRAPH, spec(budget, prefetch=0)).memory.peak_bytes <= budget
    assert "8 ranks (" in over(budget)
    assert auto.decide(GRAPH, spec(budget, world_size=8)).memory.peak_bytes <= budget


def test_smaller_buckets_are_said_to_help_where_they_do() -> None:
    wide = chain_graph([Layer(numel=1 << 20) for _ in range(6)])
    large = {"world_size": 16, "bucket": 24_000_000, "prefetch": 0}
    peaks = [plan.memory.peak_bytes for plan in auto.every_stage(wide, make_spec(**large))]
    with pytest.raises(BudgetError, match=r"try: buckets of 8MB \(stage \d peaks at"):
        auto.decide(wide, make_spec(**large, memory=min(peaks) - 1))


def test_a_stage_that_was_asked_for_must_fit_too() -> None:
    assert auto.decide(GRAPH, spec(PEAKS[1], stage=1)).stage == 1
    words = over(PEAKS[1] - 1, stage=1)
    assert words.startswith("each rank peaks at ")
    assert "1 B over its budget of" in words
    assert "try: stage 3 (peaks at " in words


def test_a_smaller_batch_is_named_where_activations_are_more_than_what_is_missing() -> None:
    wide = chain_graph([Layer(numel=64, width=4096) for _ in range(6)])
    least = min(plan.memory.peak_bytes for plan in auto.every_stage(wide, spec()))
    with pytest.raises(BudgetError, match="a smaller batch: activations take "):
        auto.decide(wide, spec(least - 1))
    words = over(1000)
    assert "a smaller batch" not in words
    assert words.splitlines()[-1] == "try: a smaller model, or several of these together: no change alone would do"


def test_rules_are_named_where_they_are_what_does_not_fit() -> None:
    assert "no rules (peaks at " in over(PEAKS[1], stage=1, rules=(Rule("*", stage=0),))
    assert auto.decide(GRAPH, spec(PEAKS[1], stage=1)).stage == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_are_tried_at_the_stage_that_was_asked_for(stage: int) -> None:
    budget = PEAKS[stage] - 1
    found = re.search(r"(\d+) ranks \(peaks at", over(budget, stage=stage))
    assert found is not None
    assert auto.decide(GRAPH, spec(budget, stage=stage, world_size=int(found.group(1)))).stage == stage


def test_more_memory_never_gives_a_higher_stage() -> None:
    budgets = range(LEAST, PEAKS[0] + 5000, 5000)
    stages = [auto.decide(GRAPH, spec(budget)).stage for budget in budgets]
    assert stages == sorted(stages, reverse=True)
    assert {0, 3} <= set(stages)


def test_every_stage_is_planned_whatever_the_budget() -> None:
    plans = auto.every_stage(GRAPH, spec(1))
    assert [plan.stage for plan in plans] == [0, 1, 2, 3]
    assert not any(plan.certificate.fits for plan in plans)


def test_progress_is_told_by_phase() -> None:
    phases: list[str] = []
    auto.decide(GRAPH, spec(), progress=lambda phase, count: phases.append(phase))
    assert phases == ["stage 0", "stage 1", "stage 2", "stage 3"]


def test_a_plan_over_its_budget_is_not_accepted() -> None:
    plan = make_plan(GRAPH, spec(PEAKS[2], stage=2))
    assert auto.accept(plan) is plan
    tight: Plan = replace(plan, spec=plan.spec.model_copy(update={"memory": PEAKS[2] - 1}))
    with pytest.raises(BudgetError, match=r"1 B over its budget"):
        auto.accept(tight)
