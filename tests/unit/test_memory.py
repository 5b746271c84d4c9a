from dataclasses import replace

import pytest

from tests.graphs import ADAM, Layer, Node, Param, chain_graph, dag_graph, own
from zplan.graph.ir import Graph, Group, Optimizer
from zplan.planner.check import check
from zplan.planner.keep import keep
from zplan.planner.lower import lower
from zplan.planner.memory import Category, Memory, scratch_nbytes, staging_nbytes, state_nbytes, sum_nbytes
from zplan.planner.program import (
    AllReduce,
    Free,
    Gather,
    GatherGradient,
    Instruction,
    Pack,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
)
from zplan.planner.sink_waits import sink_waits

# One parameter of 256 elements in fp32, activations of 64: on two ranks parts of 512 bytes.
ONE = chain_graph([Layer()])


def toy(stage: int = 3, *, graph: Graph = ONE, world: int = 2, native: bool = False) -> Program:
    return check(lower(graph, own(graph, world=world, stage=stage), native=native))


def at(program: Program, instruction: Instruction, nth: int = 0) -> int:
    return [i for i, x in enumerate(program.instructions) if x == instruction][nth]


def grown(program: Program, instruction: Instruction, nth: int = 0) -> int:
    """By how much an instruction changes what is alive."""
    memory = Memory(program)
    index = at(program, instruction, nth)
    return memory.timeline[index] - (memory.timeline[index - 1] if index else memory.resident_bytes)


def test_residents_are_parts_batch_and_state() -> None:
    # A part of 128 elements: 512 bytes, 8 bytes of state for each element and 4 for the slice; the batch has 256.
    assert Memory(toy(3)).resident_bytes == 512 + 256 + 128 * 8 + 4
    assert Memory(toy(0)).resident_bytes == 1024 + 256 + 256 * 8 + 4
    assert Memory(toy(3, world=1)).resident_bytes == 1024 + 256 + 256 * 8 + 4


def test_residents_are_buffers_and_constants_too() -> None:
    graph = dag_graph([Param()], [Node(buffer=0)], buffers=1)
    assert (
        Memory(toy(graph=graph)).resident_bytes == Memory(toy(graph=dag_graph([Param()], [Node()]))).resident_bytes + 16
    )


def test_a_gather_takes_the_whole_bucket_from_launch_to_free() -> None:
    program = toy()
    staging = staging_nbytes(Gather(0, "b0"), program.bucket("b0"), native=False)
    assert grown(program, Gather(0, "b0")) == 1024 + staging
    assert grown(program, Wait(0)) == -staging
    assert grown(program, Free("b0:whole")) == -1024


def test_a_view_takes_nothing_and_a_cast_its_own() -> None:
    assert grown(toy(), Run("t0")) == 0
    cast = toy(graph=chain_graph([Layer(cast=True)]))
    assert (grown(cast, Run("t0")), grown(cast, Free("t0"))) == (1024, -1024)


def test_views_share_a_storage_until_the_last_is_freed() -> None:
    graph = dag_graph([Param()], [Node(), Node(inputs=(1,), weights=(), view=True), Node(inputs=(2,), weights=())])
    program = toy(graph=graph)
    assert (grown(program, Run("f0")), grown(program, Run("v1"))) == (256, 0)
    freed = [grown(program, Free(name)) for name in ("y0_0", "v1")]
    assert sorted(freed) == [-256, 0]
    first, last = sorted((at(program, Free("y0_0")), at(program, Free("v1"))))
    memory = Memory(program)
    assert memory.timeline[first] == memory.timeline[first - 1]
    assert memory.timeline[last] == memory.timeline[last - 1] - 256


def test_a_view_of_a_resident_takes_and_frees_nothing() -> None:
    graph = dag_graph([Param()], [Node(view=True)])
    program = toy(graph=graph)
    assert (grown(program, Run("v0")), grown(program, Free("v0"))) == (0, 0)


def test_workspace_is_there_within_the_op_alone() -> None:
    bare = toy(graph=dag_graph([Param()], [Node()]))
    heavy = toy(graph=dag_graph([Param()], [Node(workspace=4096)]))
    index = at(heavy, Run("f0"))
    assert Memory(heavy).timeline == Memory(bare).timeline
    assert Memory(heavy).peaks[index] == Memory(bare).peaks[index] + 4096


def test_a_reduction_takes_its_flat_buffer_and_gives_a_part() -> None:
    program = toy()
    launch = next(x for x in program.instructions if isinstance(x, ReduceScatter))
    staging = staging_nbytes(launch, program.bucket("b0"), native=False)
    assert grown(program, Pack("b0")) == 1024
    assert grown(program, launch) == staging
    assert grown(program, Wait(launch.id)) == 512 - staging
    assert grown(program, Free("b0:flat")) == -1024
    assert grown(program, Free("b0:grad")) == -512


def test_an_all_reduce_is_in_place() -> None:
    program = toy(0, native=True)
    launch = next(x for x in program.instructions if isinstance(x, AllReduce))
    assert (grown(program, launch), grown(program, Wait(launch.id)), grown(program, Free("b0:flat"))) == (0, 0, 0)
    assert grown(program, Free("b0:total")) == -1024


def test_the_second_half_of_an_all_reduce_makes_the_whole_gradient() -> None:
    program = toy(0)
    launch = next(x for x in program.instructions if isinstance(x, GatherGradient))
    staging = staging_nbytes(launch, program.bucket("b0"), native=False)
    assert grown(program, launch) == 1024 + staging
    assert grown(program, Free("b0:grad")) == -512
    assert grown(program, Free("b0:total")) == -1024


def test_staging_by_backend() -> None:
    bucket = toy().bucket("b0")
    gloo = [
        staging_nbytes(launch, bucket, native=False)
        for launch in (Gather(0, "b0"), GatherGradient(0, "b0"), ReduceScatter(0, "b0"), AllReduce(0, "b0"))
    ]
    assert gloo == [1024, 1024, 1024, 0]
    for launch in (Gather(0, "b0"), GatherGradient(0, "b0"), ReduceScatter(0, "b0"), AllReduce(0, "b0")):
        assert staging_nbytes(launch, bucket, native=True) == 0


def test_where_collectives_are_native_nothing_is_staged() -> None:
    program = toy(native=True)
    assert (grown(program, Gather(0, "b0")), grown(program, Wait(0))) == (1024, 0)


def test_the_sum_of_16_bit_gradients_is_taken_in_fp32_within_the_wait() -> None:
    half = toy(graph=chain_graph([Layer(dtype="bf16")]))
    assert sum_nbytes(half.bucket("b0")) == 128 * (4 + 4 - 2)
    assert sum_nbytes(toy().bucket("b0")) == 0
    launch = next(x for x in half.instructions if isinstance(x, ReduceScatter))
    index = at(half, Wait(launch.id))
    memory = Memory(half)
    # The fp32 sum and a term of it, before the result is, while the flat buffer and the staging are still there.
    assert memory.peaks[index] == memory.timeline[index - 1] + 2 * 512


def test_scratch_is_there_within_the_update_alone() -> None:
    program = toy()
    index = at(program, Update(("b0",)))
    memory = Memory(program)
    assert scratch_nbytes(program) == 8 * 128
    assert memory.peaks[index] == memory.timeline[index] + 8 * 128
    assert memory.timeline[index] == memory.timeline[index - 1]


def test_scratch_of_all_slices_and_of_the_largest() -> None:
    graph = chain_graph([Layer(numel=256), Layer(numel=1000)])
    facts = Group(0, "fp32", "lr=1", 0.0, 0.0, 1.0, 0.5)
    program = toy(graph=replace(graph, optimizer=Optimizer("test", (facts,))))
    # Parts of 128 and 512 elements.
    assert scratch_nbytes(program) == 512 + (128 + 512) // 2


def test_state_is_that_of_the_rank_that_holds_most() -> None:
    graph = dag_graph([Param(numel=64), Param(numel=64, group=1)], [Node(weights=(0, 1))])
    shared = lower(graph, own(graph, world=3, bucket_nbytes=1 << 20))
    assert state_nbytes(shared) == 64 * 8 + 4
    whole = lower(graph, own(graph, world=3, stage=0, bucket_nbytes=1 << 20))
    # At stage 0 every rank holds both slices, the second with the padding of the bucket.
    assert state_nbytes(whole) == 192 * 8 + 2 * 4


def test_state_is_not_that_of_rank_0() -> None:
    """Three parts of 128; the border of the groups lies in the second, whose rank has two slices of 64."""
    graph = dag_graph([Param(numel=190), Param(numel=100, group=1)], [Node(weights=(0, 1))])
    program = lower(graph, own(graph, world=3, bucket_nbytes=1 << 20))
    assert state_nbytes(program) == 128 * 8 + 2 * 4
    assert scratch_nbytes(program) == 128 * 8


def test_an_optimizer_without_state() -> None:
    bare = Optimizer(
        "SGD", tuple(replace(g, state_per_element=0, state_per_slice=0, scratch_largest=0) for g in ADAM.groups)
    )
    program = toy(graph=replace(ONE, optimizer=bare))
    assert (state_nbytes(program), scratch_nbytes(program)) == (0, 0)


def test_without_trained_parameters_there_is_no_state() -> None:
    program = toy(graph=chain_graph([Layer(frozen=True)]))
    assert (state_nbytes(program), scratch_nbytes(program)) == (0, 0)
    assert Memory(program).resident_bytes == 512 + 256


def test_the_peak_names_its_place_and_what_is_alive() -> None:
    memory = Memory(toy())
    assert memory.peak_bytes == max(memory.peaks)
    assert memory.peaks[memory.peak_index] == memory.peak_bytes
    assert max(memory.peaks[: memory.peak_index]) < memory.peak_bytes
    assert sum(alive.nbytes for alive in memory.alive) == memory.peak_bytes
    assert {alive.storage for alive in memory.alive} >= {"b0:part", "optimizer state", "batch.0"}
    assert all(alive.since <= memory.peak_index for alive in memory.alive)


def test_what_an_instruction_takes_within_itself_is_among_what_is_alive() -> None:
    memory = Memory(toy(graph=dag_graph([Param()], [Node(workspace=1 << 20)])))
    assert memory.alive[0].storage == "scratch"
    assert memory.alive[0].nbytes == 1 << 20
    assert memory.by_category[Category.SCRATCH] == 1 << 20


def test_a_program_that_takes_nothing_peaks_at_rest() -> None:
    memory = Memory(toy().with_(()))
    assert (memory.peak_bytes, memory.peak_index) == (memory.resident_bytes, -1)
    assert sum(alive.nbytes for alive in memory.alive) == memory.resident_bytes


def test_categories_add_up_to_the_peak() -> None:
    memory = Memory(toy())
    assert sum(memory.by_category.values()) == memory.peak_bytes
    assert memory.by_category[Category.PARAMETERS] == 512
    assert memory.by_category[Category.BATCH] == 256
    assert memory.by_category[Category.STATE] == 128 * 8 + 4
    assert Category.BUFFERS not in memory.by_category


def test_activations_and_gradients_are_told_apart() -> None:
    wide = Memory(toy(graph=chain_graph([Layer(width=100_000)])))
    assert wide.by_category[Category.ACTIVATIONS] >= 400_000
    assert wide.by_category.get(Category.GRADIENTS, 0) < 400_000
    # At the pack the gradient and the flat buffer are both there.
    bare = Optimizer("SGD", (Group(0, "fp32", "lr=1", 0, 0, 0, 0),))
    large = Memory(toy(graph=replace(chain_graph([Layer(numel=100_000, width=1)]), optimizer=bare), world=1))
    flat = large.program.bucket("b0").nbytes
    assert large.peak_index == at(large.program, Pack("b0"))
    assert large.by_category[Category.GRADIENTS] == flat + 400_000


def test_keep_holds_the_bucket_over_the_gap() -> None:
    program = toy(2, graph=chain_graph([Layer(), Layer()]))
    kept = keep(program)
    before, after = Memory(program), Memory(kept)
    assert after.timeline[kept.boundary - 1] == before.timeline[program.boundary - 1] + 2 * 1024


def test_sunk_waits_hold_gradients_longer() -> None:
    program = toy(graph=chain_graph([Layer(width=1) for _ in range(4)]))
    sunk = sink_waits(program, depth=3)
    assert Memory(sunk).peak_bytes > Memory(program).peak_bytes
    assert Memory(sunk).timeline[-1] == Memory(program).timeline[-1]


@pytest.mark.parametrize("stage", range(4))
def test_after_the_step_residents_and_the_loss_are_left(stage: int) -> None:
    memory = Memory(toy(stage))
    assert memory.timeline[-1] == memory.resident_bytes + 4


def test_a_graph_of_nothing_but_zero_size_values_keeps_the_least_parts() -> None:
    memory = Memory(toy(graph=dag_graph([Param(numel=0)], [Node(width=0)])))
    assert {alive.storage: alive.nbytes for alive in memory.alive if alive.since < 0} == {
        "optimizer state": 64 * 8 + 4,
        "b0:part": 256,
        "batch.0": 256,
        "constant": 12,
    }
