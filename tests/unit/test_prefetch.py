from collections.abc import Callable

import pytest

from tests.graphs import Layer, Node, Param, chain_graph, dag_graph, lines, own
from zplan.errors import SpecError
from zplan.graph.ir import Graph
from zplan.planner.check import check
from zplan.planner.keep import keep
from zplan.planner.lower import lower
from zplan.planner.prefetch import prefetch
from zplan.planner.program import Caps, Free, Gather, Instruction, Program, Run, Wait

FOUR = chain_graph([Layer() for _ in range(4)])


def toy(stage: int = 3, *, graph: Graph = FOUR, world: int = 2) -> Program:
    return lower(graph, own(graph, world=world, stage=stage))


def place(program: Program, instruction: Instruction, nth: int = 0) -> int:
    return [i for i, x in enumerate(program.instructions) if x == instruction][nth]


def ahead(program: Program) -> list[int]:
    """For each gather, how many waits of earlier gathers stand between it and its own wait."""
    found = []
    for i, x in enumerate(program.instructions):
        if isinstance(x, Gather):
            waits = [y.id for y in program.instructions[i:] if isinstance(y, Wait)]
            gathers = {y.id for y in program.instructions if isinstance(y, Gather)}
            found.append([id for id in waits if id in gathers].index(x.id))
    return found


@pytest.mark.parametrize(
    ("distance", "forward"), [(0, [0, 0, 0, 0]), (1, [0, 1, 1, 1]), (2, [0, 1, 2, 2]), (3, [0, 1, 2, 3])]
)
def test_gathers_are_launched_as_far_ahead_as_asked(distance: int, forward: list[int]) -> None:
    program = check(prefetch(toy(), distance=distance))
    # Forward, then backward: nothing is launched over the border.
    assert ahead(program) == [*forward, *forward]


def test_distance_0_leaves_the_program_as_it_is() -> None:
    program = toy()
    assert prefetch(program, distance=0) is program


def test_a_program_without_gathers_is_left_as_it_is() -> None:
    program = toy(0)
    assert prefetch(program, distance=2) is program


def test_a_gather_is_launched_just_before_the_wait_of_the_one_before_it() -> None:
    program = prefetch(toy(), distance=1)
    start = place(program, Gather(0, "b0"))
    assert program.instructions[start : start + 3] == (Gather(0, "b0"), Gather(1, "b1"), Wait(0))
    assert place(program, Gather(2, "b2")) == place(program, Wait(1)) - 1


def test_the_order_of_gathers_is_kept() -> None:
    before = [x for x in toy().instructions if isinstance(x, Gather)]
    assert [x for x in prefetch(toy(), distance=3).instructions if isinstance(x, Gather)] == before


def test_nothing_is_launched_over_the_border() -> None:
    program = check(prefetch(toy(), distance=4))
    forward = [x.bucket for x in program.instructions[: program.boundary] if isinstance(x, Gather)]
    assert forward == ["b0", "b1", "b2", "b3"]


def test_a_gather_stays_behind_the_free_of_its_bucket() -> None:
    """Two gathers of one bucket on one side of the border, as behind a recompute."""
    program = toy(graph=chain_graph([Layer(), Layer()]))
    at = place(program, Run("dw0"))
    again = (Gather(5, "b1"), Wait(5), Free("b1:whole"))
    later = {Gather(5, "b0"): Gather(6, "b0"), Wait(5): Wait(6)}
    rest = tuple(later.get(x, x) for x in program.instructions[at:])
    twice = check(program.with_((*program.instructions[:at], *again, *rest)))
    moved = check(prefetch(twice, distance=4))
    start = place(moved, Gather(5, "b1"))
    assert moved.instructions[start - 1 : start + 2] == (Free("b1:whole"), Gather(5, "b1"), Gather(6, "b0"))


def test_prefetch_raises_the_cap_of_gathers_alone() -> None:
    assert prefetch(toy(), distance=3).caps == Caps(4, 1)
    assert prefetch(prefetch(toy(), distance=3), distance=1).caps == Caps(4, 1)


def test_an_op_that_reads_two_buckets_has_both_in_flight() -> None:
    graph = dag_graph([Param(unit=0), Param(unit=1)], [Node(weights=(0, 1), through="itself")])
    program = check(prefetch(toy(graph=graph), distance=1))
    assert program.instructions[:4] == (Gather(0, "b0"), Gather(1, "b1"), Wait(0), Wait(1))


def test_a_distance_below_zero_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"^prefetch -1 is below zero: 0 gathers just before use, 1 is one bucket ahead$"
    ):
        prefetch(toy(), distance=-1)


@pytest.mark.parametrize("distance", [1, 3])
def test_prefetch_is_as_printed(distance: int, golden: Callable[[str, str], None]) -> None:
    program = toy()
    golden(
        f"prefetch/distance_{distance}",
        f"before\n{lines(program)}\nafter\n{lines(prefetch(program, distance=distance))}",
    )


def test_prefetch_after_keep_is_as_printed(golden: Callable[[str, str], None]) -> None:
    program = keep(toy(2))
    golden("prefetch/kept", f"before\n{lines(program)}\nafter\n{lines(prefetch(program, distance=1))}")
