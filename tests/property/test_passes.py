"""Passes over random graphs: what comes out is valid, computes the same and sends no more."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.graphs import own
from tests.strategies import EXAMPLES, Case, Pass, bucket_sizes, cases, chains, graphs, pass_lists, stages, worlds
from zplan.graph.ir import Graph, Phase
from zplan.planner.check import check
from zplan.planner.keep import keep
from zplan.planner.lower import lower
from zplan.planner.pipeline import build, passes
from zplan.planner.prefetch import prefetch
from zplan.planner.program import LAUNCHES, REDUCTIONS, Gather, Pack, Program, Run, Update, is_chain
from zplan.planner.sink_waits import sink_waits
from zplan.planner.traffic import Traffic


def runs(program: Program) -> list[str]:
    return [x.op for x in program.instructions if isinstance(x, Run)]


def launches(program: Program) -> list[tuple[str, str]]:
    return [(type(x).__name__, x.bucket) for x in program.instructions if isinstance(x, LAUNCHES)]


def readers(graph: Graph, ownership_home: dict[str, str]) -> dict[str, set[Phase]]:
    """Bucket -> the phases in which an op that is no view or cast of a parameter reads it."""
    maker = {name: op for op in graph.ops for name in op.outputs}
    found: dict[str, set[Phase]] = {}
    for op in graph.ops:
        if is_chain(graph, op):
            continue
        for name in op.inputs:
            while name in maker and is_chain(graph, maker[name]):
                name = maker[name].inputs[0]
            if name in ownership_home:
                found.setdefault(ownership_home[name], set()).add(op.phase)
    return found


@EXAMPLES
@given(cases(), pass_lists)
def test_any_passes_in_any_order_leave_a_valid_program(case: Case, steps: list[Pass]) -> None:
    program = check(case.lower())
    for step in steps:
        program = check(step(program))


@EXAMPLES
@given(cases(), st.integers(0, 4), st.integers(1, 3))
def test_the_pipeline_leaves_a_valid_program(case: Case, distance: int, depth: int) -> None:
    built = build(case.graph, case.ownership, distance=distance, depth=depth, native=case.native)
    program = case.lower()
    for _, step in passes(distance=distance, depth=depth):
        program = step(program)
    assert built == program


@EXAMPLES
@given(cases(), pass_lists)
def test_passes_run_the_same_ops_in_the_same_order(case: Case, steps: list[Pass]) -> None:
    before = case.lower()
    after = before
    for step in steps:
        after = step(after)
    assert runs(after) == runs(before)
    for kind in (Pack, Update):
        assert [x for x in after.instructions if isinstance(x, kind)] == [
            x for x in before.instructions if isinstance(x, kind)
        ]
    assert (after.entry, after.exit, after.graph, after.ownership) == (
        before.entry,
        before.exit,
        before.graph,
        before.ownership,
    )


@EXAMPLES
@given(cases())
def test_lower_runs_every_op_once_and_the_views_once_a_phase(case: Case) -> None:
    counts = Counter(runs(case.lower()))
    for op in case.graph.ops:
        if is_chain(case.graph, op):
            assert counts[op.name] <= 2
        else:
            assert counts[op.name] == 1
    compute = [op.name for op in case.graph.ops if not is_chain(case.graph, op)]
    assert [name for name in runs(case.lower()) if name in set(compute)] == compute


@EXAMPLES
@given(cases(), pass_lists, st.integers(0, 4), st.integers(1, 3))
def test_keep_never_adds_traffic_and_the_others_leave_it(
    case: Case, steps: list[Pass], distance: int, depth: int
) -> None:
    program = case.lower()
    for step in steps:
        program = step(program)
    sent = Traffic(program).bytes_per_rank
    assert Traffic(keep(program)).bytes_per_rank <= sent
    for moved in (prefetch(program, distance=distance), sink_waits(program, depth=depth)):
        assert Traffic(moved).bytes_per_rank == sent
        assert Traffic(moved).by_kind == Traffic(program).by_kind
        assert Counter(map(repr, moved.instructions)) == Counter(map(repr, program.instructions))
    gathers = [x for x in program.instructions if isinstance(x, Gather)]
    assert [x for x in prefetch(program, distance=distance).instructions if isinstance(x, Gather)] == gathers


@EXAMPLES
@given(cases(), st.integers(0, 4), st.integers(1, 3))
def test_gathers_and_reductions_of_each_bucket_are_as_its_stage_says(case: Case, distance: int, depth: int) -> None:
    program = build(case.graph, case.ownership, distance=distance, depth=depth)
    count = Counter(launches(program))
    reads = readers(case.graph, dict(case.ownership.home))
    for bucket in case.ownership.buckets:
        phases = len(reads.get(bucket.name, ()))
        alone = bucket.world == 1
        if alone or bucket.stage == 0:
            gathers = 0
        elif bucket.stage == 3:
            gathers = phases
        else:
            gathers = min(phases, 1) if bucket.trains else 0
        assert count["Gather", bucket.name] == gathers
        assert count["ReduceScatter", bucket.name] == int(bucket.trains and not alone)
        assert count["GatherGradient", bucket.name] == int(bucket.trains and not alone and bucket.stage == 0)


@EXAMPLES
@given(chains(trained=True), worlds, stages, bucket_sizes, st.integers(0, 4), st.integers(1, 3), st.booleans())
def test_traffic_is_the_formula(
    graph: Graph, world: int, stage: int, size: int, distance: int, depth: int, native: bool
) -> None:
    ownership = own(graph, world=world, stage=stage, bucket_nbytes=size)
    traffic = Traffic(build(graph, ownership, distance=distance, depth=depth, native=native))
    psi_nbytes = sum(bucket.nbytes for bucket in ownership.buckets)
    assert traffic.bytes_per_rank * world == (2, 2, 2, 3)[stage] * psi_nbytes * (world - 1)
    assert traffic.bytes_per_rank == sum(traffic.by_kind.values()) == sum(traffic.by_instruction)
    assert 0 <= traffic.padding_nbytes <= traffic.bytes_per_rank


@EXAMPLES
@given(cases(), st.integers(0, 4), st.integers(1, 3))
def test_no_more_are_in_flight_than_asked(case: Case, distance: int, depth: int) -> None:
    program = sink_waits(prefetch(case.lower(), distance=distance), depth=depth)
    flying: dict[int, bool] = {}
    split = any(bucket.stage == 0 for bucket in case.ownership.buckets) and not case.native
    for x in program.instructions:
        if isinstance(x, LAUNCHES):
            flying[x.id] = isinstance(x, REDUCTIONS)
        elif hasattr(x, "id"):
            del flying[x.id]
        assert sum(flying.values()) <= (2 * depth if split else depth)
        assert sum(not reduction for reduction in flying.values()) <= distance + 1


@EXAMPLES
@given(graphs, worlds, stages, bucket_sizes, st.data())
def test_hash_is_stable_and_tells_every_change(
    graph: Graph, world: int, stage: int, size: int, data: st.DataObject
) -> None:
    program = lower(graph, own(graph, world=world, stage=stage, bucket_nbytes=size))
    again = lower(graph, own(graph, world=world, stage=stage, bucket_nbytes=size))
    assert program.hash == again.hash
    instructions = program.instructions
    at = data.draw(st.integers(0, len(instructions) - 1))
    without = instructions[:at] + instructions[at + 1 :]
    assert program.with_(without).hash != program.hash
    assert program.with_((*without, instructions[at])).hash != program.hash or at == len(instructions) - 1
    assert prefetch(program, distance=1).hash != program.hash or not any(isinstance(x, Gather) for x in instructions)
