"""Pipeline: the order of the passes, and nothing else."""

from collections.abc import Callable

from zplan.graph.ir import Graph
from zplan.planner.check import check
from zplan.planner.keep import keep
from zplan.planner.lower import lower
from zplan.planner.ownership import Ownership
from zplan.planner.prefetch import prefetch
from zplan.planner.program import Position, Program
from zplan.planner.sink_waits import sink_waits

Pass = Callable[[Program], Program]


def passes(*, distance: int = 1, depth: int = 2) -> tuple[tuple[str, Pass], ...]:
    return (
        ("keep", keep),
        ("prefetch", lambda program: prefetch(program, distance=distance)),
        ("sink_waits", lambda program: sink_waits(program, depth=depth)),
    )


def build(
    graph: Graph,
    ownership: Ownership,
    *,
    distance: int = 1,
    depth: int = 2,
    native: bool = False,
    position: Position = Position.ONLY,
) -> Program:
    """Lowers a graph and runs every pass over it; the laws are checked after each."""
    program = check(lower(graph, ownership, native=native, position=position))
    for _, step in passes(distance=distance, depth=depth):
        program = check(step(program))
    return program
