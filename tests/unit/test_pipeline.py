import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.graphs import Layer, chain_graph, own
from zplan.errors import CheckError
from zplan.planner import pipeline
from zplan.planner.check import check
from zplan.planner.keep import keep
from zplan.planner.lower import lower
from zplan.planner.pipeline import build, passes
from zplan.planner.prefetch import prefetch
from zplan.planner.program import LAUNCHES, Program, Wait
from zplan.planner.sink_waits import sink_waits

GRAPH = chain_graph([Layer() for _ in range(3)])


def test_the_order_of_passes() -> None:
    assert [name for name, _ in passes()] == ["keep", "prefetch", "sink_waits"]


def test_build_is_lower_and_every_pass() -> None:
    ownership = own(GRAPH, world=2, stage=[0, 1, 3])
    program = lower(GRAPH, ownership)
    program = sink_waits(prefetch(keep(program), distance=3), depth=1)
    assert build(GRAPH, ownership, distance=3, depth=1) == program


def test_native_all_reduce_reaches_lower() -> None:
    ownership = own(GRAPH, world=2, stage=0)
    kinds = {type(x).__name__ for x in build(GRAPH, ownership, native=True).instructions}
    assert "AllReduce" in kinds
    assert "GatherGradient" not in kinds


@pytest.mark.parametrize(
    ("stage", "gathers", "scatters", "gradient_gathers"), [(0, 0, 1, 1), (1, 1, 1, 0), (2, 1, 1, 0), (3, 2, 1, 0)]
)
def test_collectives_of_a_bucket_are_those_of_its_stage(
    stage: int, gathers: int, scatters: int, gradient_gathers: int
) -> None:
    program = build(GRAPH, own(GRAPH, world=2, stage=stage))
    counts = Counter((type(x).__name__, x.bucket) for x in program.instructions if isinstance(x, LAUNCHES))
    for bucket in ("b0", "b1", "b2"):
        assert counts["Gather", bucket] == gathers
        assert counts["ReduceScatter", bucket] == scatters
        assert counts["GatherGradient", bucket] == gradient_gathers


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_has_no_collectives(stage: int) -> None:
    program = build(GRAPH, own(GRAPH, world=1, stage=stage))
    assert not any(isinstance(x, (*LAUNCHES, Wait)) for x in program.instructions)


@pytest.mark.parametrize("broken", range(4))
def test_the_laws_are_checked_after_lower_and_after_every_pass(broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that drops the last instruction is named by the law it breaks, whichever it is."""

    def drop(program: Program) -> Program:
        return program.with_(program.instructions[:-1])

    steps = list(passes())
    if broken == 0:
        monkeypatch.setattr(pipeline, "lower", lambda *a, **k: drop(lower(*a, **k)))
    else:
        name, step = steps[broken - 1]
        steps[broken - 1] = (name, lambda program: drop(step(program)))
        monkeypatch.setattr(pipeline, "passes", lambda **options: tuple(steps))
    checked: list[Program] = []

    def spy(program: Program) -> Program:
        checked.append(program)
        return check(program)

    monkeypatch.setattr(pipeline, "check", spy)
    with pytest.raises(CheckError, match=r"^law 5: b2:grad is left at exit"):
        build(GRAPH, own(GRAPH, world=2))
    assert len(checked) == broken + 1


def test_building_twice_gives_the_same_hash() -> None:
    ownership = own(GRAPH, world=2, stage=[0, 3])
    assert build(GRAPH, ownership).hash == build(replace(GRAPH), ownership).hash


def test_no_order_comes_from_a_set() -> None:
    """Megatron-LM#2252: the same program in processes that hash strings in other ways."""
    code = """
from tests.graphs import Node, Param, chain_graph, dag_graph, lines, own
from zplan.planner.pipeline import build
graph = dag_graph([Param(unit=i) for i in range(6)], [Node(weights=tuple(range(6)), through="itself")] * 3)
print(lines(build(graph, own(graph, world=3, stage=[0, 1, 3]))), graph.hash)
"""
    root = Path(__file__).parents[2]
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
