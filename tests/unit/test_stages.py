from dataclasses import replace

import pytest

from tests.graphs import Layer, chain_graph
from zplan.errors import SpecError
from zplan.graph.ir import Graph
from zplan.planner.choices import Choice, choose, innermost
from zplan.planner.stages import STAGES, Residency, parse_stage


def graph(stages: dict[str, int], *, aliases: tuple[str, ...] = ()) -> Graph:
    """Two layers; the first weight may have other names."""
    made = chain_graph([Layer(), Layer()])
    first, second = made.tensors
    return replace(made, tensors=(replace(first, aliases=(first.name, *aliases)), second), stages=stages)


def test_the_table_is_that_of_the_paper() -> None:
    shard, whole = Residency.SHARD, Residency.WHOLE
    held = {number: (stage.state, stage.accumulator, stage.parameter) for number, stage in STAGES.items()}
    assert held == {
        0: (whole, whole, whole),
        1: (shard, whole, shard),
        2: (shard, shard, shard),
        3: (shard, shard, shard),
    }
    assert [stage.regather for stage in STAGES.values()] == [False, False, False, True]
    assert [stage.reduce_always for stage in STAGES.values()] == [False, False, True, True]
    assert [stage.reduction for stage in STAGES.values()] == ["all-reduce"] + ["reduce-scatter"] * 3
    assert [stage.sent for stage in STAGES.values()] == ["2 psi", "2 psi", "2 psi", "3 psi"]


@pytest.mark.parametrize(("stage", "number"), [(0, 0), (3, 3), ("1", 1), (" 2 ", 2)])
def test_parse_stage(stage: object, number: int) -> None:
    assert parse_stage(stage) == number


@pytest.mark.parametrize("stage", [4, -1, "4", "", 1.0, True, None, "stage 1"])
def test_parse_stage_refuses_what_does_not_exist(stage: object) -> None:
    with pytest.raises(SpecError) as caught:
        parse_stage(stage, what="rule 1")
    assert str(caught.value) == f"rule 1 {stage!r} does not exist: there are 0, 1, 2 and 3"


def test_without_annotations_all_are_at_the_default() -> None:
    assert choose(graph({}), default=2) == {
        "layers.0.weight": Choice(2, "default: stage 2"),
        "layers.1.weight": Choice(2, "default: stage 2"),
    }


def test_the_innermost_annotation_wins_over_those_around_it_and_the_default() -> None:
    choices = choose(graph({"": 0, "layers": 1, "layers.1": 3}), default=2)
    assert choices == {
        "layers.0.weight": Choice(1, "annotate: layers"),
        "layers.1.weight": Choice(3, "annotate: layers.1"),
    }


def test_an_annotated_model_is_named() -> None:
    assert choose(graph({"": 0}), default=2)["layers.0.weight"] == Choice(0, "annotate: model")


def test_an_annotation_of_a_module_is_not_that_of_one_whose_name_begins_alike() -> None:
    assert choose(graph({"lay": 0, "layers.11": 1}), default=2)["layers.1.weight"].stage == 2


def test_any_alias_of_a_tied_tensor_matches() -> None:
    choices = choose(graph({"head": 1}, aliases=("head.weight",)), default=3)
    assert choices["layers.0.weight"] == Choice(1, "annotate: head")


def test_aliases_that_agree_are_no_conflict() -> None:
    choices = choose(graph({"layers.0": 1, "head": 1}, aliases=("head.weight",)), default=3)
    assert choices["layers.0.weight"] == Choice(1, "annotate: layers.0")


def test_a_tied_tensor_with_two_stages_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        choose(graph({"layers": 2, "head": 1}, aliases=("head.weight",)), default=3)
    assert str(caught.value) == (
        "tied parameter layers.0.weight is annotated with different stages "
        "(layers.0.weight: stage 2, head.weight: stage 1): give it one stage"
    )


@pytest.mark.parametrize(
    ("name", "module"),
    [("a.b.weight", "a.b"), ("a.c.weight", "a"), ("d.weight", ""), ("scale", ""), ("a.b.c.d.weight", "a.b")],
)
def test_innermost(name: str, module: str) -> None:
    assert innermost({"": 0, "a": 1, "a.b": 2}, name) == module


def test_innermost_is_none_where_nothing_is_annotated() -> None:
    assert innermost({"a": 1}, "b.weight") is None


def test_auto_is_no_stage_of_a_tensor() -> None:
    with pytest.raises(SpecError, match="stage 'auto' is for the whole plan: give 0, 1, 2 or 3 here"):
        parse_stage("auto")
