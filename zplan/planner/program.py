"""Program: the planned instructions of one micro-batch.

An instruction names values. Those of the traced graph keep their names; each bucket adds its own:

    b0:part    this rank's part of the parameters, held between steps
    b0:master  what is held in its place where parameters compute in another dtype: b0:part is then a cast of it; of a
               bucket that every rank holds whole, b0:whole is
    b0:whole   the parameters, whole: what a gather makes; its tensors are views of it
    b0:flat    the gradients of this rank, packed as the bucket is laid out
    b0:grad    this rank's part of the gradients, averaged over ranks: what a reduce-scatter makes
    b0:total   the gradients, whole and averaged over ranks: what an all-reduce makes
    b0:acc     the gradients of the micro-batches so far, in fp32: this rank's own, whole, at stages 0 and 1; its
               part of their sum over ranks at stages 2 and 3, where each micro-batch is reduced. There, b0:grad of a
               micro-batch is a sum in fp32, and an average only when the last one has been added up
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from zplan.graph.ir import Graph, Op, OpKind, Phase, digest
from zplan.planner.buckets import Bucket
from zplan.planner.ownership import Ownership


class Position(Enum):
    """Which micro-batch of an optimizer step the program is for; `evaluation` is of none."""

    ONLY = "only"
    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"
    EVALUATION = "evaluation"

    @property
    def updates(self) -> bool:
        """Ends an optimizer step."""
        return self in (Position.ONLY, Position.LAST)

    @property
    def begins(self) -> bool:
        """Nothing of an earlier micro-batch is there."""
        return self in (Position.ONLY, Position.FIRST, Position.EVALUATION)

    @property
    def ends(self) -> bool:
        """Nothing is left for a later micro-batch."""
        return self in (Position.ONLY, Position.LAST, Position.EVALUATION)


@dataclass(frozen=True, slots=True)
class Cast:
    """Copies masters into the dtype that computes: b:master -> b:part, or b:whole where every rank holds them whole."""

    bucket: str


@dataclass(frozen=True, slots=True)
class Gather:
    """Starts the all-gather of a bucket's parameters: b:part -> b:whole."""

    id: int
    bucket: str


@dataclass(frozen=True, slots=True)
class Pack:
    """Copies the bucket's gradients into its flat buffer, zeros in the padding -> b:flat."""

    bucket: str


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Adds up micro-batches: b:flat, or after a reduction b:grad. The first makes b:acc, the last adds b:acc to it."""

    bucket: str


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Starts the reduction of b:flat over ranks; at its wait the mean of this rank's part is there -> b:grad."""

    id: int
    bucket: str


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Starts the reduction of b:flat over ranks; at its wait the mean of all parts is there -> b:total."""

    id: int
    bucket: str


@dataclass(frozen=True, slots=True)
class GatherGradient:
    """Starts the all-gather of reduced gradients: b:grad -> b:total. With a reduce-scatter before it, an all-reduce."""

    id: int
    bucket: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Ends the collective `id`; what it makes may be read from here on."""

    id: int


@dataclass(frozen=True, slots=True)
class Run:
    """Runs an op of the graph. A second run of a forward op makes its outputs afresh."""

    op: str


@dataclass(frozen=True, slots=True)
class Free:
    """Releases a value. Its memory is free once no other value lives in the same storage."""

    value: str


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's step on what this rank owns of these buckets; reads b:grad (or b:total), writes parameters."""

    buckets: tuple[str, ...]


Launch = Gather | ReduceScatter | AllReduce | GatherGradient
Instruction = Launch | Wait | Cast | Pack | Accumulate | Run | Free | Update
REDUCTIONS = (ReduceScatter, AllReduce, GatherGradient)
LAUNCHES = (Gather, *REDUCTIONS)


def part(bucket: str) -> str:
    return f"{bucket}:part"


def master(bucket: str) -> str:
    return f"{bucket}:master"


def whole(bucket: str) -> str:
    return f"{bucket}:whole"


def flat(bucket: str) -> str:
    return f"{bucket}:flat"


def grad(bucket: str) -> str:
    return f"{bucket}:grad"


def total(bucket: str) -> str:
    return f"{bucket}:total"


def acc(bucket: str) -> str:
    return f"{bucket}:acc"


def held(bucket: Bucket) -> str:
    """The value that is there between steps."""
    if bucket.master:
        return master(bucket.name)
    return whole(bucket.name) if bucket.whole_at_rest else part(bucket.name)


def cast(bucket: Bucket) -> str:
    """The value that `Cast` makes."""
    return whole(bucket.name) if bucket.whole_at_rest else part(bucket.name)


def adds_first(bucket: Bucket) -> bool:
    """Whether micro-batches are added up before they are reduced over ranks, once; else each is reduced."""
    return bucket.world == 1 or not bucket.policy.reduce_always


def adds(bucket: Bucket) -> str:
    """The value that `Accumulate` adds up."""
    return flat(bucket.name) if adds_first(bucket) else grad(bucket.name)


def makes(instruction: Launch) -> str:
    """The value that is there after the launch's wait."""
    match instruction:
        case Gather(_, bucket):
            return whole(bucket)
        case ReduceScatter(_, bucket):
            return grad(bucket)
        case AllReduce(_, bucket) | GatherGradient(_, bucket):
            return total(bucket)


def takes(instruction: Launch) -> str:
    """The value that must stay as it is from the launch to its wait."""
    match instruction:
        case Gather(_, bucket):
            return part(bucket)
        case ReduceScatter(_, bucket) | AllReduce(_, bucket):
            return flat(bucket)
        case GatherGradient(_, bucket):
            return grad(bucket)


def gradient(bucket: Bucket) -> str:
    """The value that `Update` reads for a bucket."""
    if bucket.world == 1:
        return flat(bucket.name)
    return total(bucket.name) if bucket.state_whole else grad(bucket.name)


@dataclass(frozen=True, slots=True)
class Caps:
    """The most collectives that may be in flight: gathers of parameters, and reductions of gradients."""

    gathers: int = 1
    reductions: int = 1


@dataclass(frozen=True)
class Program:
    """Instructions in the order in which they run, and what is resident before the first and after the last.

    `native`: collectives are the backend's own, as on NCCL; else each is an all-to-all, as on gloo. `earlier`: how many
    micro-batches of the step have run before it at most; what they returned is still there.
    """

    graph: Graph
    ownership: Ownership
    instructions: tuple[Instruction, ...]
    entry: tuple[str, ...]
    exit: tuple[str, ...]
    position: Position = Position.ONLY
    caps: Caps = Caps()
    native: bool = False
    earlier: int = 0

    def bucket(self, name: str) -> Bucket:
        return self.ownership.bucket[name]

    def with_(self, instructions: tuple[Instruction, ...], *, caps: Caps | None = None) -> "Program":
        return replace(self, instructions=instructions, caps=caps or self.caps)

    @cached_property
    def home(self) -> Mapping[str, frozenset[str]]:
        """Value -> the buckets whose whole parameters it is read from (itself, a view, a cast)."""
        home = self.ownership.home
        return {name: frozenset(home[tensor] for tensor in origin) for name, origin in self.graph.derived.items()}

    @cached_property
    def boundary(self) -> int:
        """The index of the first instruction after forward: past its last run and the frees that follow it."""
        op = self.graph.op
        seen: set[str] = set()
        last = -1
        for index, instruction in enumerate(self.instructions):
            if isinstance(instruction, Run) and instruction.op not in seen:
                seen.add(instruction.op)
                if op[instruction.op].phase is Phase.FORWARD and not is_chain(self.graph, op[instruction.op]):
                    last = index
        index = last + 1
        while index < len(self.instructions) and isinstance(self.instructions[index], Free):
            index += 1
        return index

    @cached_property
    def hash(self) -> str:
        return digest(
            [
                [repr(instruction) for instruction in self.instructions],
                [self.entry, self.exit, self.position.value, repr(self.caps), self.native, self.earlier],
            ]
        )


def is_chain(graph: Graph, op: Op) -> bool:
    """A view or cast of parameters alone: it is run again in each phase that reads it."""
    return op.kind in (OpKind.VIEW, OpKind.CAST) and bool(op.outputs) and op.outputs[0] in graph.derived
