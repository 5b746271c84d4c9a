from dataclasses import replace

import pytest

from tests.graphs import Layer, Node, Param, chain_graph, dag_graph, own
from zplan.graph.ir import OpKind
from zplan.planner.lower import lower
from zplan.planner.prefetch import prefetch
from zplan.planner.program import (
    AllReduce,
    Caps,
    Free,
    Gather,
    GatherGradient,
    Launch,
    Pack,
    Position,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
    gradient,
    is_chain,
    makes,
    takes,
)


def toy(stage: int = 3, world: int = 2) -> Program:
    graph = chain_graph([Layer(), Layer(cast=True)])
    return lower(graph, own(graph, world=world, stage=stage))


@pytest.mark.parametrize(
    ("launch", "takes_", "makes_"),
    [
        (Gather(0, "b3"), "b3:part", "b3:whole"),
        (ReduceScatter(0, "b3"), "b3:flat", "b3:grad"),
        (AllReduce(0, "b3"), "b3:flat", "b3:total"),
        (GatherGradient(0, "b3"), "b3:grad", "b3:total"),
    ],
)
def test_what_launches_take_and_make(launch: Launch, takes_: str, makes_: str) -> None:
    assert (takes(launch), makes(launch)) == (takes_, makes_)


def test_what_the_update_reads() -> None:
    def read(stage: int, world: int) -> str:
        return gradient(toy(stage, world).bucket("b0"))

    assert [read(stage, 2) for stage in range(4)] == ["b0:total", "b0:grad", "b0:grad", "b0:grad"]
    assert [read(stage, 1) for stage in range(4)] == ["b0:flat"] * 4


def test_the_boundary_is_past_the_last_forward_op_and_its_frees() -> None:
    program = toy()
    at = program.boundary
    assert program.instructions[at - 2 : at + 1] == (Run("loss"), Free("y1"), Run("d"))


def test_the_boundary_does_not_move_with_prefetch_or_a_recompute() -> None:
    program = toy()
    ahead = prefetch(program, distance=2)
    assert ahead.instructions[ahead.boundary - 1 : ahead.boundary + 1] == (Free("y1"), Gather(3, "b1"))
    at = program.boundary
    again = program.with_((*program.instructions[: at + 1], Run("f0"), *program.instructions[at + 1 :]))
    assert again.boundary == at


def test_the_boundary_of_a_program_without_forward_is_its_begin() -> None:
    assert toy().with_((Pack("b0"),)).boundary == 0


def test_chains_are_views_and_casts_of_parameters_alone() -> None:
    graph = dag_graph([Param()], [Node(through="view cast"), Node(view=True, weights=())])
    assert [op.name for op in graph.ops if is_chain(graph, op)] == ["view0", "cast1"]
    assert graph.op["v1"].kind is OpKind.VIEW
    assert {name: sorted(origin) for name, origin in graph.derived.items()} == {
        "units.0.p0": ["units.0.p0"],
        "view0": ["units.0.p0"],
        "cast1": ["units.0.p0"],
    }
    program = lower(graph, own(graph, world=2))
    assert program.home["cast1"] == frozenset({"b0"})
    assert "v1" not in program.home


def test_with_changes_the_instructions_and_keeps_the_caps_unless_told() -> None:
    program = replace(toy(), caps=Caps(3, 4))
    assert program.with_(()).caps == Caps(3, 4)
    assert program.with_((), caps=Caps(1, 2)).caps == Caps(1, 2)
    assert program.with_(()).instructions == ()
    assert program.instructions


def test_the_hash_tells_instructions_residents_position_and_caps() -> None:
    program = toy()
    others = [
        program.with_(program.instructions[:-1]),
        program.with_((*program.instructions[:-2], *reversed(program.instructions[-2:]))),
        replace(program, caps=Caps(2, 1)),
        replace(program, entry=program.entry[1:]),
        replace(program, exit=program.exit[1:]),
        replace(program, position=Position.LAST),
        toy(2, 3),
        toy(0),
    ]
    hashes = [program.hash, *(other.hash for other in others)]
    # Stages 2 and 3 lower to the same instructions: they differ in what `keep` does, and in the hash of the plan.
    assert len(set(hashes)) == len(hashes) - 1
    assert toy(2).hash == program.hash == toy().hash
    assert len(program.hash) == 16


def test_instructions_print_as_what_makes_them() -> None:
    for instruction in (Gather(1, "b0"), Wait(1), Pack("b0"), Run("f0"), Free("y0"), Update(("b0",))):
        assert eval(repr(instruction)) == instruction
