"""Memory against an oracle that shares no code with it: for every instruction, what is alive is searched anew."""

from collections.abc import Iterator

from hypothesis import given

from tests.strategies import EXAMPLES, Case, cases, pass_lists
from zplan.planner.buckets import Bucket
from zplan.planner.memory import Memory, scratch_nbytes, state_nbytes
from zplan.planner.program import (
    AllReduce,
    Cast,
    Free,
    Gather,
    GatherGradient,
    Pack,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
)

SIZE = {"fp32": 4, "bf16": 2, "int64": 8}
NEVER = 1 << 30


def births(program: Program) -> Iterator[tuple[str, str, int, int]]:
    """(value, storage, bytes, index) of everything that is made, residents at -1."""
    graph = program.graph
    buckets = program.ownership.buckets
    size = {bucket.name: bucket.world * bucket.part * SIZE[bucket.dtype] for bucket in buckets}
    packed = {bucket.name: bucket.world * bucket.part * SIZE[wire(bucket)] for bucket in buckets}
    updated = {bucket.name: bucket.world * bucket.part * SIZE[bucket.master or bucket.dtype] for bucket in buckets}
    for value in program.entry:
        name, _, kind = value.partition(":")
        if kind == "master":
            yield (
                value,
                value,
                updated[name] // (1 if held_whole(program.bucket(name)) else program.bucket(name).world),
                -1,
            )
        elif kind:
            share = {"part": program.bucket(name).world, "whole": 1}[kind]
            yield value, value, size[name] // share, -1
        else:
            yield value, value, graph.storages[value], -1
    launches = {
        x.id: x for x in program.instructions if isinstance(x, Gather | ReduceScatter | AllReduce | GatherGradient)
    }
    for index, x in enumerate(program.instructions):
        match x:
            case Run(name):
                for value in graph.op[name].outputs:
                    storage = graph.values[value].storage
                    if storage not in graph.tensor:
                        yield value, storage, graph.storages[storage], index
            case Cast(name) if held_whole(program.bucket(name)):
                yield f"{name}:whole", f"{name}:whole", size[name], index
            case Cast(name):
                yield f"{name}:part", f"{name}:part", size[name] // program.bucket(name).world, index
            case Pack(name):
                yield f"{name}:flat", f"{name}:flat", packed[name], index
            case Gather(_, name):
                yield f"{name}:whole", f"{name}:whole", size[name], index
            case GatherGradient(_, name) if packed[name] == updated[name]:
                yield f"{name}:total", f"{name}:total", packed[name], index
            case AllReduce(_, name) if packed[name] == updated[name]:
                yield f"{name}:total", f"{name}:flat", packed[name], index
            case ReduceScatter(_, name) if program.native and packed[name] == updated[name]:
                yield f"{name}:grad", f"{name}:grad", packed[name] // program.bucket(name).world, index
            case Wait(id) if not isinstance(launches[id], Gather):
                name = launches[id].bucket
                bucket = program.bucket(name)
                if isinstance(launches[id], ReduceScatter):
                    sent_again = bucket.stage == 0
                    if not program.native or packed[name] != updated[name]:
                        nbytes = (packed if sent_again else updated)[name]
                        yield f"{name}:grad", f"{name}:grad", nbytes // bucket.world, index
                elif packed[name] != updated[name]:
                    yield f"{name}:total", f"{name}:total", updated[name], index


def held_whole(bucket: Bucket) -> bool:
    return bucket.world == 1 or bucket.stage == 0 or (bucket.stage < 3 and not bucket.trains)


def wire(bucket: Bucket) -> str:
    if bucket.world == 1 and bucket.master:
        return bucket.master
    return bucket.reduce or bucket.dtype


def lifetimes(program: Program) -> list[tuple[str, int, int, int]]:
    """(storage, bytes, first index, last index) of every value: both ends are within its life."""
    found = []
    for value, storage, nbytes, born in births(program):
        died = next(
            (i for i, x in enumerate(program.instructions) if i > born and x == Free(value)),
            NEVER,
        )
        found.append((storage, nbytes, born, died))
    return found


def staging(program: Program) -> list[tuple[str, int, int, int]]:
    """What a collective holds besides, from launch to wait."""
    found: list[tuple[str, int, int, int]] = []
    for index, x in enumerate(program.instructions):
        if not isinstance(x, Gather | ReduceScatter | GatherGradient):
            continue
        bucket = program.bucket(x.bucket)
        end = next(i for i, y in enumerate(program.instructions) if y == Wait(x.id))
        sent = bucket.dtype if isinstance(x, Gather) else wire(bucket)
        numel = bucket.world * bucket.part
        if not program.native:
            found.append((f"staging {x.id}", numel * SIZE[sent], index, end))
        # What comes in another dtype than the update reads.
        if SIZE[wire(bucket)] != SIZE[bucket.master or bucket.dtype]:
            if isinstance(x, GatherGradient):
                found.append((f"wire {x.id}", numel * SIZE[sent], index, end))
            if isinstance(x, ReduceScatter) and program.native:
                found.append((f"wire {x.id}", bucket.part * SIZE[sent], index, end))
    return found


def within(program: Program, index: int) -> int:
    """What an instruction takes and gives back."""
    match program.instructions[index]:
        case Run(name):
            return program.graph.op[name].workspace
        case Update():
            return optimizer(program)[1]
        case Wait(id):
            for x in program.instructions:
                if isinstance(x, ReduceScatter) and x.id == id and not program.native:
                    bucket = program.bucket(x.bucket)
                    if wire(bucket) != "bf16":
                        return 0
                    # The fp32 sum and one term; the sum itself stays where the update reads fp32.
                    return (4 if bucket.master and bucket.stage > 0 else 6) * bucket.part
    return 0


def owned(bucket: Bucket, rank: int) -> Iterator[tuple[int, int]]:
    """(group, elements) of each run of one group that a rank updates in a bucket, counted element by element."""
    low, high = rank * bucket.part, (rank + 1) * bucket.part
    if bucket.world == 1 or bucket.stage == 0:
        low, high = 0, bucket.world * bucket.part
    groups = []
    for element in range(low, high):
        # Padding goes with the tensor before it.
        groups.append([slot.group for slot in bucket.slots if slot.offset <= element][-1])
    for group in sorted(set(groups)):
        yield group, groups.count(group)


def optimizer(program: Program) -> tuple[int, int]:
    """State and scratch of ADAM in tests/graphs.py: 8 bytes an element and 4 a slice; 8 an element of the largest."""
    states, scratches = [0], [0]
    for rank in range(program.ownership.world):
        slices = [found for bucket in program.ownership.buckets if bucket.trains for found in owned(bucket, rank)]
        states.append(sum(8 * numel + 4 for _, numel in slices))
        scratches.append(max((8 * numel for _, numel in slices), default=0))
    return max(states), max(scratches)


def total(lives: list[tuple[str, int, int, int]], first: int, last: int) -> int:
    """Bytes of the storages with a value that is born at `first` or before and dies at `last` or after."""
    return sum({storage: nbytes for storage, nbytes, born, died in lives if born <= first and died >= last}.values())


@EXAMPLES
@given(cases(), pass_lists)
def test_memory_equals_the_oracle(case: Case, steps: list) -> None:
    program = case.lower()
    for step in steps:
        program = step(program)
    state, _ = optimizer(program)
    lives = [*lifetimes(program), *staging(program), ("optimizer state", state, -1, NEVER)]
    memory = Memory(program)
    end = range(len(program.instructions))
    assert memory.resident_bytes == total(lives, -1, 0)
    assert memory.timeline == tuple(total(lives, i, i + 1) for i in end)
    assert memory.peaks == tuple(total(lives, i, i) + within(program, i) for i in end)
    assert memory.peak_bytes == max((memory.resident_bytes, *memory.peaks))


@EXAMPLES
@given(cases(), pass_lists)
def test_what_is_alive_at_the_peak_adds_up_to_it(case: Case, steps: list) -> None:
    program = case.lower()
    for step in steps:
        program = step(program)
    memory = Memory(program)
    assert sum(alive.nbytes for alive in memory.alive) == memory.peak_bytes
    assert sum(memory.by_category.values()) == memory.peak_bytes
    assert [alive.nbytes for alive in memory.alive] == sorted((alive.nbytes for alive in memory.alive), reverse=True)
    assert len({alive.storage for alive in memory.alive}) == len(memory.alive)


@EXAMPLES
@given(cases())
def test_at_the_end_only_residents_and_outputs_are_left(case: Case) -> None:
    program = case.lower()
    memory = Memory(program)
    graph = case.graph
    held = {graph.values[name].storage for name in graph.outputs} - {graph.values[name].storage for name in graph.batch}
    assert memory.timeline[-1] == memory.resident_bytes + sum(graph.storages[name] for name in held)


@EXAMPLES
@given(cases())
def test_state_and_scratch_are_those_of_the_fullest_rank(case: Case) -> None:
    program = case.lower()
    assert (state_nbytes(program), scratch_nbytes(program)) == optimizer(program)
