"""Memory: a fold over the instructions that will run, at the level of storages. Bytes are those of one rank.

Counted: parameters, buffers, constants and the caller's batch; optimizer states in the steady step; every value of the
graph, views sharing their storage; flat gradient buffers; gathered buckets; the buffers and the staging of
collectives from launch to wait; what an op allocates and drops within its call; the scratch of the optimizer's step.

Not counted yet: the first step apart from the steady one; workspaces inside CPU kernels (packing of bf16 products,
convolutions); the rounding of an allocator, contexts and communicators on a GPU; Python and the process itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import repeat

from zplan.planner.buckets import Bucket
from zplan.planner.program import (
    Accumulate,
    AllReduce,
    Cast,
    Free,
    Gather,
    GatherGradient,
    Instruction,
    Launch,
    Pack,
    Position,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
    acc,
    adds_first,
    cast,
    flat,
    held,
    makes,
    whole,
)
from zplan.units import ITEMSIZE


class Category(Enum):
    PARAMETERS = "parameters"
    STATE = "optimizer state"
    BUFFERS = "buffers"
    BATCH = "batch"
    GATHERED = "gathered parameters"
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    COMMUNICATION = "communication"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Alive:
    """A storage, and the instruction after which it is there (-1: resident)."""

    storage: str
    nbytes: int
    category: Category
    since: int


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of one rank over a program.

    `timeline[i]` is what is alive after instruction i, `peaks[i]` the most that is alive during it.
    """

    program: Program

    @cached_property
    def resident_bytes(self) -> int:
        return self._ledger().nbytes

    @cached_property
    def _optimizer(self) -> tuple[int, int]:
        return state_nbytes(self.program), scratch_nbytes(self.program)

    def _ledger(self) -> "_Ledger":
        state, scratch = self._optimizer
        return _Ledger(self.program, state, scratch)

    @cached_property
    def _fold(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ledger = self._ledger()
        timeline, peaks = [], []
        for index, instruction in enumerate(self.program.instructions):
            transient = ledger.enter(index, instruction)
            peaks.append(ledger.nbytes + transient)
            ledger.leave(instruction)
            timeline.append(ledger.nbytes)
        return tuple(timeline), tuple(peaks)

    @property
    def timeline(self) -> tuple[int, ...]:
        return self._fold[0]

    @property
    def peaks(self) -> tuple[int, ...]:
        return self._fold[1]

    @cached_property
    def peak_bytes(self) -> int:
        return max((self.resident_bytes, *self.peaks))

    @cached_property
    def peak_index(self) -> int:
        """The first instruction that reaches the peak; -1 where the residents alone are the most."""
        return self.peaks.index(self.peak_bytes) if self.peak_bytes in self.peaks else -1

    @cached_property
    def alive(self) -> tuple[Alive, ...]:
        """What is there at the peak, largest first; what the instruction takes within itself comes as scratch."""
        ledger = self._ledger()
        transient = 0
        for index, instruction in enumerate(self.program.instructions[: self.peak_index + 1]):
            transient = ledger.enter(index, instruction)
            if index < self.peak_index:
                ledger.leave(instruction)
        found = list(ledger.alive.values())
        if transient:
            found.append(Alive("scratch", transient, Category.SCRATCH, self.peak_index))
        return tuple(sorted(found, key=lambda alive: (-alive.nbytes, alive.storage)))

    @cached_property
    def by_category(self) -> Mapping[Category, int]:
        """Bytes at the peak; categories with none are left out."""
        totals = dict.fromkeys(Category, 0)
        for alive in self.alive:
            totals[alive.category] += alive.nbytes
        return {category: nbytes for category, nbytes in totals.items() if nbytes}


def state_nbytes(program: Program) -> int:
    """Bytes of optimizer state in the steady step, on the rank that holds most."""
    return round(max(map(_state, _slices_by_rank(program), repeat(program)), default=0))


def scratch_nbytes(program: Program) -> int:
    """Bytes that one optimizer step takes and gives back, on the rank that takes most."""
    return round(max(map(_scratch, _slices_by_rank(program), repeat(program)), default=0))


_Sizes = Mapping[tuple[int, str], list[int]]


def _slices_by_rank(program: Program) -> Iterator[_Sizes]:
    """For each rank, elements of each slice that it updates, by optimizer group and dtype."""
    ownership = program.ownership
    alike = all(bucket.state_whole for bucket in ownership.buckets if bucket.trains)
    for rank in range(1 if alike else ownership.world):
        sizes: dict[tuple[int, str], list[int]] = {}
        for piece in ownership.slices(rank):
            sizes.setdefault((piece.group, ownership.bucket[piece.bucket].held), []).append(piece.numel)
        yield sizes


def _state(sizes: _Sizes, program: Program) -> float:
    total = 0.0
    for key, numels in sizes.items():
        facts = program.graph.optimizer.facts(*key)
        total += facts.state_per_element * sum(numels) + facts.state_per_slice * len(numels)
    return total


def _scratch(sizes: _Sizes, program: Program) -> float:
    most = 0.0
    for key, numels in sizes.items():
        facts = program.graph.optimizer.facts(*key)
        most = max(most, facts.scratch_largest * max(numels) + facts.scratch_all * sum(numels))
    return most


class _Ledger:
    """The storages that are alive, as instructions go by: `enter` takes what one needs, `leave` gives back."""

    def __init__(self, program: Program, state: int, scratch: int) -> None:
        self.program = program
        self.alive: dict[str, Alive] = {}
        self.nbytes = 0
        self._names: dict[str, set[str]] = {}
        self._storage: dict[str, str] = {}
        self._launches: dict[int, Launch] = {}
        graph = program.graph
        self._gradients = frozenset(tensor.grad for tensor in graph.tensors if tensor.grad is not None)
        for bucket in program.ownership.buckets:
            self._add(held(bucket), bucket.held_nbytes, Category.PARAMETERS, -1)
        for value in (*graph.buffers, *graph.constants):
            self._add_value(value, Category.BUFFERS, -1)
        for value in graph.batch:
            self._add_value(value, Category.BATCH, -1)
        for bucket in program.ownership.buckets:
            if acc(bucket.name) in program.entry:
                self._add(acc(bucket.name), acc_nbytes(bucket), Category.GRADIENTS, -1)
            if whole(bucket.name) in program.entry and not bucket.at_hand:
                self._add(whole(bucket.name), bucket.nbytes, Category.GATHERED, -1)
        returned = {graph.values[name].storage for name in graph.outputs}
        nbytes = program.earlier * sum(graph.storages[storage] for storage in returned if storage in graph.storages)
        if nbytes:
            self._add("outputs of earlier micro-batches", nbytes, Category.ACTIVATIONS, -1)
        self._add("optimizer state", state, Category.STATE, -1)
        self._scratch = scratch

    def enter(self, index: int, instruction: Instruction) -> int:
        """Returns the bytes that the instruction takes and gives back within itself."""
        program = self.program
        match instruction:
            case Run(name):
                op = program.graph.op[name]
                for value in op.outputs:
                    category = Category.GRADIENTS if value in self._gradients else Category.ACTIVATIONS
                    self._add_value(value, category, index)
                return op.workspace
            case Cast(name):
                of = program.bucket(name)
                nbytes = of.nbytes if of.whole_at_rest else of.part_nbytes
                self._add(cast(of), nbytes, Category.GATHERED, index)
            case Pack(name):
                self._add(flat(name), flat_nbytes(program.bucket(name)), Category.GRADIENTS, index)
            case Accumulate(name):
                if program.position is Position.FIRST:
                    self._add(acc(name), acc_nbytes(program.bucket(name)), Category.GRADIENTS, index)
                return sum_in_fp32_nbytes(program.bucket(name), program.position)
            case Gather() | ReduceScatter() | AllReduce() | GatherGradient():
                self._launches[instruction.id] = instruction
                self._launch(index, instruction)
            case Wait(id):
                launch = self._launches[id]
                if not isinstance(launch, Gather):
                    return self._reduced(index, launch)
            case Update(names):
                updated = [program.bucket(name) for name in names]
                # Gradients that were added up in fp32 are handed to the optimizer in the parameters' dtype.
                narrowed = sum(bucket.part_nbytes for bucket in updated if self._sums(bucket) and not bucket.master)
                return self._scratch + narrowed
        return 0

    def leave(self, instruction: Instruction) -> None:
        match instruction:
            case Wait(id):
                self._remove(staging(id))
            case Free(value):
                self._remove(value)

    def _launch(self, index: int, launch: Launch) -> None:
        bucket = self.program.bucket(launch.bucket)
        extra = staging_nbytes(launch, bucket, native=self.program.native)
        match launch:
            case Gather():
                self._add(makes(launch), bucket.nbytes, Category.GATHERED, index)
            case GatherGradient():
                name = on_wire(launch) if self._widens(launch) else makes(launch)
                self._add(name, flat_nbytes(bucket), Category.GRADIENTS, index)
            case ReduceScatter() if self.program.native:
                name = on_wire(launch) if self._widens(launch) else makes(launch)
                self._add(name, bucket.part * ITEMSIZE[bucket.wire], Category.GRADIENTS, index)
            case AllReduce() if not self._widens(launch):
                self._add(flat(launch.bucket), flat_nbytes(bucket), Category.GRADIENTS, index, name=makes(launch))
        self._add(staging(launch.id), extra, Category.COMMUNICATION, index)

    def _reduced(self, index: int, launch: Launch) -> int:
        """The end of a reduction; returns what it takes within itself."""
        bucket, widens = self.program.bucket(launch.bucket), self._widens(launch)
        if isinstance(launch, ReduceScatter) and not self.program.native:
            self._add(makes(launch), bucket.part * self._itemsize(launch), Category.GRADIENTS, index)
            return sum_nbytes(bucket, widens=widens)
        if not widens:
            return 0
        # What came over the wire is there while it becomes what it is kept in.
        numel = bucket.part if isinstance(launch, ReduceScatter) else bucket.numel
        self._add(makes(launch), numel * self._itemsize(launch), Category.GRADIENTS, index)
        self._remove(on_wire(launch))
        return 0 if isinstance(launch, AllReduce) else numel * ITEMSIZE[bucket.wire]

    def _sums(self, bucket: Bucket) -> bool:
        """Whether a reduction's result is kept in fp32 while the wire carries 16 bit: to be added up."""
        several = self.program.position not in (Position.ONLY, Position.EVALUATION)
        return several and not adds_first(bucket) and ITEMSIZE[bucket.wire] < ITEMSIZE["fp32"]

    def _itemsize(self, launch: Launch) -> int:
        """Of what a reduction makes: as on the wire where it is sent once more, else as the update reads it."""
        bucket = self.program.bucket(launch.bucket)
        if self._sums(bucket):
            return ITEMSIZE["fp32"]
        return ITEMSIZE[bucket.wire if isinstance(launch, ReduceScatter) and bucket.state_whole else bucket.held]

    def _widens(self, launch: Launch) -> bool:
        return self._itemsize(launch) != ITEMSIZE[self.program.bucket(launch.bucket).wire]

    def _add_value(self, value: str, category: Category, index: int) -> None:
        graph = self.program.graph
        storage = graph.values[value].storage
        if storage not in graph.tensor:
            self._add(storage, graph.storages[storage], category, index, name=value)

    def _add(self, storage: str, nbytes: int, category: Category, index: int, *, name: str = "") -> None:
        self._storage[name or storage] = storage
        if storage in self._names:
            self._names[storage].add(name or storage)
            return
        self._names[storage] = {name or storage}
        self.alive[storage] = Alive(storage, nbytes, category, index)
        self.nbytes += nbytes

    def _remove(self, value: str) -> None:
        storage = self._storage.pop(value, None)
        if storage is None:
            return
        self._names[storage].discard(value)
        if not self._names[storage]:
            del self._names[storage]
            self.nbytes -= self.alive.pop(storage).nbytes


def staging(id: int) -> str:
    return f"staging {id}"


def on_wire(launch: Launch) -> str:
    return f"{makes(launch)} on the wire"


def flat_nbytes(bucket: Bucket) -> int:
    """Bytes of a bucket's gradients, packed."""
    return bucket.numel * ITEMSIZE[bucket.wire]


def staging_nbytes(launch: Launch, bucket: Bucket, *, native: bool) -> int:
    """What a backend holds from launch to wait besides what the instruction takes and makes.

    On gloo an all-gather sends a repeated copy of the part, as large as what it makes, and a reduce-scatter receives
    into a buffer as large as what it takes (see runtime/comm.py); the all-to-all beneath both has no staging of its own
    (measured on torch 2.13). NCCL reads and writes in place.
    """
    if native:
        return 0
    match launch:
        case Gather():
            return bucket.nbytes
        case GatherGradient() | ReduceScatter():
            return flat_nbytes(bucket)
    return 0


def sum_nbytes(bucket: Bucket, *, widens: bool = False) -> int:
    """What a sum in rank order takes at most besides its result: for 16 bit the fp32 sum and one term of it are there
    before the result is. `widens`: the fp32 sum is the result.
    """
    itemsize, wide = ITEMSIZE[bucket.wire], ITEMSIZE["fp32"]
    if itemsize >= wide:
        return 0
    return bucket.part * (wide if widens else 2 * wide - itemsize)


def acc_nbytes(bucket: Bucket) -> int:
    """Bytes of a bucket's accumulator: whole where micro-batches are added up before they are reduced, in fp32."""
    numel = bucket.numel if adds_first(bucket) else bucket.part
    return numel * max(ITEMSIZE[bucket.wire], ITEMSIZE["fp32"])


def sum_in_fp32_nbytes(bucket: Bucket, position: Position) -> int:
    """What adding a micro-batch to others takes within itself: 16 bit is widened first."""
    narrow = ITEMSIZE[bucket.wire] < ITEMSIZE["fp32"]
    return acc_nbytes(bucket) if narrow and adds_first(bucket) and position is not Position.FIRST else 0
