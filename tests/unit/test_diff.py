from dataclasses import replace

from tests.graphs import Layer, chain_graph
from zplan.planner.diff import Change, diff, unlike
from zplan.planner.plan import Plan, make_plan
from zplan.planner.spec import Rule, make_spec

GRAPH = chain_graph([Layer() for _ in range(4)])


def made(stage: int = 3, *, graph=GRAPH, **options) -> Plan:
    return make_plan(graph, make_spec(**{"stage": stage, "world_size": 4, "bucket": 1024, **options}))


def test_the_same_plans_have_no_difference() -> None:
    found = made().diff(made())
    assert not found
    assert str(found) == "the plans are the same"


def test_a_stage_differs() -> None:
    found = made(2).diff(made(3))
    assert found
    assert found.asked == (Change("stage", "2", "3"),)
    assert found.model == ()
    assert found.tensors[0] == Change("layers.0.weight", "stage 2 (default: stage 2)", "stage 3 (default: stage 3)")
    assert found.program[0] == Change("gather", "4", "8")
    assert "peak" in {change.what for change in found.costs}
    text = str(found)
    assert "asked:\n  stage: 2 -> 3\n" in text
    assert "layers.0..3.weight x4: stage 2 (default: stage 2) -> stage 3 (default: stage 3)" in text


def test_the_first_instruction_that_differs_is_named() -> None:
    found = made(0).diff(made(3))
    first = found.program[-1]
    assert first.what == "first instruction that differs"
    assert first.after.startswith("0 gather b0 = layers.0.weight")


def test_a_rule_that_changes_nothing_is_what_was_asked_alone() -> None:
    found = made(3).diff(made(3, rules=(Rule("*", stage=3),)))
    assert found.asked
    assert [found.model, found.tensors, found.buckets, found.program, found.costs] == [()] * 5


def test_another_batch_is_another_graph_of_the_same_model() -> None:
    wider = chain_graph([Layer(width=128) for _ in range(4)])
    assert unlike(GRAPH, wider) == ()
    found = diff(made(), made(graph=wider))
    assert found.model
    assert not found.buckets


def test_other_models_are_told_by_parameters() -> None:
    other = chain_graph([Layer(), Layer(numel=512), Layer(dtype="bf16")])
    assert unlike(GRAPH, other) == (
        Change("layers.1.weight", "fp32[256]", "fp32[512]"),
        Change("layers.2.weight", "fp32[256]", "bf16[256]"),
        Change("layers.3.weight", "fp32[256]", "-"),
    )
    first, *rest = GRAPH.tensors
    tied = replace(GRAPH, tensors=(replace(first, aliases=(first.name, "head.weight")), *rest))
    assert unlike(GRAPH, tied) == (Change("layers.0.weight", "fp32[256]", "fp32[256] tied with head.weight"),)


def test_as_json() -> None:
    found = made(2).diff(made(3)).as_json()
    assert found["asked"] == ({"what": "stage", "before": "2", "after": "3"},)
