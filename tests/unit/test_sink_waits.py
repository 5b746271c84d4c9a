from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.graphs import Layer, chain_graph, lines, own
from zplan.errors import SpecError
from zplan.planner.check import check
from zplan.planner.lower import lower
from zplan.planner.program import REDUCTIONS, Caps, Free, Gather, Program, Update, Wait
from zplan.planner.sink_waits import sink_waits

FOUR = chain_graph([Layer() for _ in range(4)])


def toy(stage: int | list[int] = 3, *, native: bool = False, world: int = 2) -> Program:
    return lower(FOUR, own(FOUR, world=world, stage=stage), native=native)


def later(program: Program) -> list[int]:
    """For each reduction, how many others are launched between it and its wait."""
    found = []
    for i, x in enumerate(program.instructions):
        if isinstance(x, REDUCTIONS):
            end = program.instructions.index(Wait(x.id))
            found.append(sum(type(y) is type(x) for y in program.instructions[i + 1 : end]))
    return found


@pytest.mark.parametrize(
    ("depth", "count"), [(1, [0, 0, 0, 0]), (2, [1, 1, 1, 0]), (3, [2, 2, 1, 0]), (9, [3, 2, 1, 0])]
)
def test_waits_come_when_depth_later_ones_have_been_launched(depth: int, count: list[int]) -> None:
    program = check(sink_waits(toy(), depth=depth))
    assert later(program) == count


def test_depth_1_waits_just_before_the_next_launch() -> None:
    program = check(sink_waits(toy(), depth=1))
    reductions = [x for x in program.instructions if isinstance(x, REDUCTIONS)]
    for one, two in pairwise(reductions):
        at = program.instructions.index(two)
        assert program.instructions[at - 2 : at] == (Wait(one.id), Free(f"{one.bucket}:flat"))


def test_all_is_waited_for_before_the_update() -> None:
    program = check(sink_waits(toy(), depth=9))
    at = next(i for i, x in enumerate(program.instructions) if isinstance(x, Update))
    ids = [x.id for x in program.instructions if isinstance(x, REDUCTIONS)]
    assert program.instructions[at - 8 : at : 2] == tuple(map(Wait, ids))


def test_the_order_of_reductions_is_kept() -> None:
    before = [x for x in toy().instructions if isinstance(x, REDUCTIONS)]
    assert [x for x in sink_waits(toy(), depth=3).instructions if isinstance(x, REDUCTIONS)] == before


def test_waits_for_gathers_stay() -> None:
    program = sink_waits(toy(), depth=3)
    for i, x in enumerate(program.instructions):
        if isinstance(x, Gather):
            assert program.instructions[i + 1] == Wait(x.id)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_all_reduce_of_two_has_depth_of_each_in_flight(depth: int) -> None:
    program = check(sink_waits(toy(0), depth=depth))
    assert program.caps == Caps(1, 2 * depth)
    flying: dict[int, type] = {}
    for x in program.instructions:
        if isinstance(x, REDUCTIONS):
            flying[x.id] = type(x)
        elif isinstance(x, Wait):
            flying.pop(x.id, None)
        for kind in REDUCTIONS:
            assert list(flying.values()).count(kind) <= depth


def test_an_all_reduce_in_one_sinks_like_a_reduce_scatter() -> None:
    program = check(sink_waits(toy(0, native=True), depth=2))
    assert later(program) == [1, 1, 1, 0]
    assert program.caps == Caps(1, 2)


def test_stages_side_by_side() -> None:
    check(sink_waits(toy([0, 3, 1]), depth=2))


def test_sunk_waits_can_be_sunk_anew() -> None:
    """A pass takes any valid program, not only what lower makes."""
    deep = sink_waits(toy([0, 3]), depth=3)
    assert check(sink_waits(deep, depth=1)).instructions == sink_waits(toy([0, 3]), depth=1).instructions
    shallow = sink_waits(toy([0, 3]), depth=1)
    assert check(sink_waits(shallow, depth=3)).instructions == deep.instructions


def test_sink_waits_raises_the_cap_of_reductions_alone() -> None:
    assert sink_waits(toy(), depth=3).caps == Caps(1, 3)
    assert sink_waits(sink_waits(toy(), depth=3), depth=1).caps == Caps(1, 3)


def test_one_rank_has_nothing_to_sink() -> None:
    program = toy(world=1)
    assert sink_waits(program, depth=2).instructions == program.instructions


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^depth 0 is below one: 1 waits for a reduction before the next is launched$"):
        sink_waits(toy(), depth=0)


@pytest.mark.parametrize(("name", "stage", "depth"), [("depth_1", 3, 1), ("depth_2", 3, 2), ("all_reduce", 0, 2)])
def test_sink_waits_is_as_printed(name: str, stage: int, depth: int, golden: Callable[[str, str], None]) -> None:
    program = toy(stage)
    golden(f"sink_waits/{name}", f"before\n{lines(program)}\nafter\n{lines(sink_waits(program, depth=depth))}")
