from collections import Counter
from collections.abc import Callable

import pytest

from tests.graphs import Layer, Node, Param, chain_graph, dag_graph, lines, own
from zplan.graph.ir import Graph
from zplan.planner.check import check
from zplan.planner.keep import keep
from zplan.planner.lower import lower
from zplan.planner.prefetch import prefetch
from zplan.planner.program import Free, Gather, Program

TWO = chain_graph([Layer(), Layer(cast=True)])


def toy(stage: int | list[int], *, graph: Graph = TWO, world: int = 2) -> Program:
    return lower(graph, own(graph, world=world, stage=stage))


def gathers(program: Program) -> Counter[str]:
    return Counter(x.bucket for x in program.instructions if isinstance(x, Gather))


@pytest.mark.parametrize("stage", [1, 2])
def test_keep_gathers_once(stage: int) -> None:
    assert gathers(toy(stage)) == {"b0": 2, "b1": 2}
    kept = check(keep(toy(stage)))
    assert gathers(kept) == {"b0": 1, "b1": 1}
    assert [x.value for x in kept.instructions if isinstance(x, Free) and "whole" in x.value] == [
        "b1:whole",
        "b0:whole",
    ]
    assert max(i for i, x in enumerate(kept.instructions) if isinstance(x, Gather)) < kept.boundary


@pytest.mark.parametrize("stage", [0, 3])
def test_keep_leaves_stages_0_and_3_as_they_are(stage: int) -> None:
    assert keep(toy(stage)) == toy(stage)


def test_keep_goes_by_the_bucket() -> None:
    assert gathers(check(keep(toy([3, 2])))) == {"b0": 2, "b1": 1}


def test_keep_leaves_a_bucket_that_one_phase_reads() -> None:
    graph = dag_graph(
        [Param(unit=0), Param(unit=1)], [Node(weights=(0,), forward=False), Node(weights=(1,), backward=False)]
    )
    assert keep(toy(2, graph=graph)) == toy(2, graph=graph)


def test_keep_twice_is_keep() -> None:
    once = keep(toy(2))
    assert keep(once) == once


def test_keep_after_prefetch_is_valid() -> None:
    assert gathers(check(keep(prefetch(toy(2), distance=2)))) == {"b0": 1, "b1": 1}


def test_keep_does_not_edit_its_input() -> None:
    program = toy(2)
    before = program.instructions
    keep(program)
    assert program.instructions is before


@pytest.mark.parametrize(("name", "stage"), [("stage_2", 2), ("stages_3_and_1", [3, 1])])
def test_keep_is_as_printed(name: str, stage: int | list[int], golden: Callable[[str, str], None]) -> None:
    program = toy(stage)
    golden(f"keep/{name}", f"before\n{lines(program)}\nafter\n{lines(keep(program))}")
