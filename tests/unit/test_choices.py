from dataclasses import replace

import pytest

from tests.graphs import Layer, chain_graph
from zplan.errors import SpecError
from zplan.graph.ir import Graph
from zplan.planner.buckets import make_buckets
from zplan.planner.choices import Choice, choose, unused
from zplan.planner.plan import make_plan
from zplan.planner.program import Gather
from zplan.planner.spec import Rule, make_spec

FIRST, SECOND = "layers.0.weight", "layers.1.weight"


def graph(stages: dict[str, int] | None = None, *, aliases: tuple[str, ...] = ()) -> Graph:
    """Two layers; the first weight may have other names."""
    made = chain_graph([Layer(), Layer()])
    first, second = made.tensors
    return replace(made, tensors=(replace(first, aliases=(first.name, *aliases)), second), stages=stages or {})


def chosen(*rules: Rule, default: int = 2, **options) -> dict[str, Choice]:
    return dict(choose(graph(**options), default=default, rules=rules))


def test_the_first_rule_that_matches_wins_and_is_named() -> None:
    found = chosen(Rule("layers.0.*", stage=0), Rule("layers.*", stage=3))
    assert found == {FIRST: Choice(0, "rule 1: layers.0.*"), SECOND: Choice(3, "rule 2: layers.*")}


def test_what_no_rule_matches_keeps_its_annotation_or_the_default() -> None:
    found = chosen(Rule("layers.1.weight", stage=3), stages={"layers": 1})
    assert found == {FIRST: Choice(1, "annotate: layers"), SECOND: Choice(3, "rule 1: layers.1.weight")}
    assert chosen(Rule(SECOND, stage=3))[FIRST] == Choice(2, "default: stage 2")
    assert choose(graph(), default=2, auto=True)[FIRST] == Choice(2, "auto: stage 2")


def test_rules_go_before_the_innermost_annotation() -> None:
    assert chosen(Rule("*", stage=3), stages={"layers.0": 1})[FIRST] == Choice(3, "rule 1: *")


@pytest.mark.parametrize("pattern", ["*", "layers.*", "*.weight", "layers.?.weight", "layers.[01].*", "*ers.0.w*"])
def test_a_star_crosses_dots(pattern: str) -> None:
    assert chosen(Rule(pattern, stage=0))[FIRST].stage == 0


@pytest.mark.parametrize("pattern", ["layers.0", "Layers.*", "weight", "layers.0.weight.*", "ayers.*"])
def test_a_whole_name_must_match_and_case_counts(pattern: str) -> None:
    with pytest.raises(SpecError, match="matches no parameter"):
        chosen(Rule(pattern, stage=0))


def test_each_thing_is_said_by_the_first_rule_that_says_it() -> None:
    found = chosen(Rule("*.weight", bucket="1KB"), Rule("layers.*", stage=3), Rule("*", stage=1, bucket="9KB"))
    assert found[FIRST] == Choice(3, "rule 2: layers.*; bucket by rule 1: *.weight", 1000)


def test_kept_at_stage_3_is_stage_2_and_says_so() -> None:
    assert chosen(Rule("*", stage=3, keep=True))[FIRST] == Choice(2, "rule 1: *; stage 3 kept")
    assert chosen(Rule("*", keep=True), default=3)[FIRST] == Choice(2, "default: stage 3; stage 3 kept by rule 1: *")
    assert chosen(Rule("*", keep=True), default=1)[FIRST] == Choice(1, "default: stage 1")
    held = chosen(Rule("layers.0.*", keep=False), Rule("*", keep=True), default=3)
    assert (held[FIRST].stage, held[SECOND].stage) == (3, 2)


def test_a_kept_parameter_is_gathered_once() -> None:
    spec = make_spec(stage=3, world_size=2, rules=(Rule("layers.0.*", keep=True),))
    plan = make_plan(chain_graph([Layer(), Layer()]), spec)
    gathers = [x.bucket for x in plan.program.instructions if isinstance(x, Gather)]
    kept, regathered = plan.ownership.home[FIRST], plan.ownership.home[SECOND]
    assert (gathers.count(kept), gathers.count(regathered)) == (1, 2)
    assert plan.ownership.bucket[kept].stage == 2


@pytest.mark.parametrize("pattern", [FIRST, "head.weight", "layers.0.*", "head*"])
def test_any_name_of_a_tied_tensor_matches(pattern: str) -> None:
    assert chosen(Rule(pattern, stage=0), aliases=("head.weight",))[FIRST] == Choice(0, f"rule 1: {pattern}")


def test_names_of_a_tied_tensor_that_get_different_answers_are_refused() -> None:
    with pytest.raises(SpecError) as caught:
        chosen(Rule("head.*", stage=0), Rule("layers.*", stage=3), aliases=("head.weight",))
    assert str(caught.value) == (
        "tied parameter layers.0.weight gets different answers for stage (layers.0.weight by rule 2: 3, head.weight by "
        "rule 1: 0): name it in one rule before both"
    )
    agreed = chosen(Rule("head.*", stage=3), Rule("layers.*", stage=3), aliases=("head.weight",))
    assert agreed[FIRST].stage == 3


def test_a_rule_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(SpecError) as caught:
        chosen(Rule("*", stage=1), Rule("layer.0.wieght", stage=3))
    assert str(caught.value).startswith("rule 2 'layer.0.wieght' matches no parameter; nearest: layers.0.weight")


def test_a_rule_behind_others_that_decides_nothing_is_told() -> None:
    rules = (Rule("*", stage=1), Rule("layers.0.*", stage=3))
    assert unused(graph(), rules) == ("rule 2: layers.0.* decides nothing: rules before it match first",)
    assert unused(graph(), rules[::-1]) == ()
    plan = make_plan(graph(), make_spec(stage=3, world_size=2, rules=rules))
    assert "note: rule 2: layers.0.* decides nothing" in str(plan)


def test_a_rule_bounds_the_bytes_that_travel_together() -> None:
    made = chain_graph([Layer() for _ in range(4)])
    (nbytes,) = {tensor.numel * 4 for tensor in made.tensors}
    rules = (Rule("layers.[01].*", bucket=nbytes),)
    buckets = make_buckets(made, choose(made, default=3, rules=rules), world=2, bucket_nbytes=1 << 20)
    assert [[slot.tensor for slot in bucket.slots] for bucket in buckets] == [
        [FIRST],
        [SECOND],
        ["layers.2.weight", "layers.3.weight"],
    ]
