"""Pipeline: the order of the passes, and nothing else."""

from collections.abc import Callable

from zplan.graph.ir import Graph
from zplan.planner.check import check
from zplan.planner.keep import keep
from zplan.planner.lower import lower
from zplan.planner.ownership import Ownership
from zplan.planner.prefetch import prefetch
from zplan.planner.program import Program
from zplan.planner.sink_waits import sink_waits
from zplan.planner.spec import Schedule

Pass = Callable[[Program], Program]


def passes(schedule: Schedule) -> tuple[tuple[str, Pass], ...]:
    return (
        ("keep", keep),
        ("prefetch", lambda program: prefetch(program, distance=schedule.prefetch)),
        ("sink_waits", lambda program: sink_waits(program, depth=schedule.depth)),
    )


def build(graph: Graph, ownership: Ownership, schedule: Schedule) -> Program:
    """Lowers a graph and runs every pass over it; the laws are checked after each."""
    program = check(lower(graph, ownership, native_all_reduce=schedule.native_all_reduce))
    for _, step in passes(schedule):
        program = check(step(program))
    return program
