"""Buckets: tensors that travel together, laid out in one flat buffer of equal parts, one part a rank.

Glossary: a *slot* is a tensor's place in a bucket; a *part* is a rank's equal share of the buffer; a *unit* is the
block of the model (`blocks.3`, `wte`) at whose border a bucket may end.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zplan.graph.ir import Graph, Phase, Tensor
from zplan.planner.choices import Choice
from zplan.planner.stages import STAGES, Residency, Stage
from zplan.units import ITEMSIZE

# Every tensor starts, and every part ends, at a multiple of 64 elements: a fused optimizer handles whole vectors in
# another way than the scalar tail behind them, so cuts elsewhere change last bits; and it keeps views aligned on CUDA.
ALIGNMENT = 64

# A tensor above the limit takes along what is at most this part of it: a norm before a matrix is no collective alone.
ALONG = 8

# What the tensors of a bucket have in common: dtype, that of their masters, stage, whether they train, the bytes they
# may travel in (None: as all do), and the unit whose tensors are used far apart, or "".
_Kind = tuple[str, str, int, bool, int | None, str]


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's place: elements `[offset, offset + numel)` of the flat buffer."""

    tensor: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    group: int | None

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer of `world * part` elements; rank r owns elements `[r * part, (r + 1) * part)`.

    `trains`: its tensors get gradients and are updated. `dtype`: what its tensors compute in, and what a gather of them
    carries. `master`: what they are held and updated in between steps, "" where that is the same. `reduce`: what a
    reduction of their gradients carries, "" where that is `dtype`.
    """

    name: str
    dtype: str
    stage: int
    trains: bool
    world: int
    part: int
    slots: tuple[Slot, ...]
    master: str = ""
    reduce: str = ""

    @property
    def policy(self) -> Stage:
        return STAGES[self.stage]

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.world * self.part

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def part_nbytes(self) -> int:
        return self.part * ITEMSIZE[self.dtype]

    @property
    def held(self) -> str:
        """The dtype of what is held between steps, and of what the update reads."""
        return self.master or self.dtype

    @property
    def held_nbytes(self) -> int:
        """Bytes that one rank holds of it between steps."""
        return (self.numel if self.whole_at_rest else self.part) * ITEMSIZE[self.held]

    @property
    def wire(self) -> str:
        """The dtype of gradients until they are reduced; in a world of one they go to the update as they are."""
        return self.held if self.world == 1 else self.reduce or self.dtype

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.numel - sum(slot.numel for slot in self.slots)

    @property
    def whole_at_rest(self) -> bool:
        """Held whole between steps: at stage 0, in a world of one, and below stage 3 when it is never updated."""
        if self.world == 1 or self.policy.parameter is Residency.WHOLE:
            return True
        return not self.trains and not self.policy.regather

    @property
    def at_hand(self) -> bool:
        """Whole between steps, and in the dtype that it computes in: it needs no gather and no cast."""
        return self.whole_at_rest and not self.master

    @property
    def state_whole(self) -> bool:
        """Every rank updates all of it."""
        return self.world == 1 or self.policy.state is Residency.WHOLE


def make_buckets(
    graph: Graph, choices: Mapping[str, Choice], *, world: int, bucket_nbytes: int, reduce: str = ""
) -> tuple[Bucket, ...]:
    """Lays every parameter of the model out, in order of first use, cut at the borders of units.

    A bucket holds one dtype, one stage, and only tensors that train or only tensors that do not. Units are put
    together while they fit in `bucket_nbytes`, or in what a rule says; a larger unit is cut between its tensors, a
    tensor never: one that is larger takes small ones before it along, up to an eighth of its own size. A unit whose
    tensors are used in places far apart (tied embeddings, a block applied twice) is not put with others. `reduce`: the
    dtype in which gradients of another one are reduced, "" where each keeps its own.
    """
    first, spread = _uses(graph)
    tensors = sorted(graph.tensors, key=lambda tensor: first.get(tensor.name, len(graph.ops)))
    open_: dict[_Kind, list[Tensor]] = {}
    closed: list[list[Tensor]] = []
    for unit, members in _units(tensors):
        for key, mine in _split_by_kind(members, choices, unit, spread).items():
            limit = bucket_nbytes if key[4] is None else key[4]
            current = open_.get(key)
            if current is not None and _nbytes([*current, *mine]) > limit:
                current = None
            for tensor in mine:
                if current is None or not _travel(current, tensor, limit):
                    current = []
                    closed.append(current)
                    open_[key] = current
                current.append(tensor)
    return tuple(_lay_out(f"b{i}", members, choices, world, reduce) for i, members in enumerate(closed))


def unit_of(name: str) -> str:
    """The block a parameter belongs to: up to the first numbered component, else the first component.

    >>> unit_of("blocks.3.attn.qkv.weight"), unit_of("wte.weight"), unit_of("scale")
    ('blocks.3', 'wte', '')
    """
    parts = name.split(".")[:-1]
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0] if parts else ""


def _units(tensors: Iterable[Tensor]) -> Iterable[tuple[str, list[Tensor]]]:
    units: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        units.setdefault(unit_of(tensor.name), []).append(tensor)
    return units.items()


def _split_by_kind(
    tensors: Iterable[Tensor], choices: Mapping[str, Choice], unit: str, spread: frozenset[str]
) -> dict[_Kind, list[Tensor]]:
    kinds: dict[_Kind, list[Tensor]] = {}
    for tensor in tensors:
        alone = f"{unit}!" if tensor.name in spread else ""
        choice = choices[tensor.name]
        key = (tensor.dtype, tensor.master, choice.stage, tensor.grad is not None, choice.bucket, alone)
        kinds.setdefault(key, []).append(tensor)
    return kinds


def _uses(graph: Graph) -> tuple[dict[str, int], frozenset[str]]:
    """First forward use of each tensor, and the tensors that are used again after another unit's first use."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, op in enumerate(graph.ops):
        if op.phase is not Phase.FORWARD:
            break
        for name in op.inputs:
            for tensor in graph.derived.get(name, ()):
                first.setdefault(tensor, index)
                last[tensor] = index
    starts = sorted((index, unit_of(tensor)) for tensor, index in first.items())
    positions = [index for index, _ in starts]
    return first, frozenset(
        tensor
        for tensor, index in first.items()
        if last[tensor] > index and _other_starts(starts, positions, index, last[tensor], unit_of(tensor))
    )


def _other_starts(starts: list[tuple[int, str]], positions: list[int], low: int, high: int, unit: str) -> bool:
    return any(other != unit for _, other in starts[bisect_right(positions, low) : bisect_left(positions, high)])


def _travel(current: list[Tensor], tensor: Tensor, limit: int) -> bool:
    """Whether a tensor goes with those before it: within the limit, or as one so large that they add little to it."""
    alone = _nbytes([tensor])
    before = _nbytes(current)
    return before + alone <= limit or (alone > limit and before <= min(limit, alone // ALONG))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(_aligned(tensor.numel) * ITEMSIZE[tensor.dtype] for tensor in tensors)


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _lay_out(name: str, members: list[Tensor], choices: Mapping[str, Choice], world: int, reduce: str) -> Bucket:
    """Tensors of one optimizer group lie side by side, so that a rank's share of a group is one slice."""
    slots = []
    offset = 0
    for tensor in sorted(members, key=lambda tensor: -1 if tensor.group is None else tensor.group):
        slots.append(Slot(tensor.name, tensor.shape, offset, tensor.numel, tensor.group))
        offset += _aligned(tensor.numel)
    part = max(ALIGNMENT, _aligned(-(-offset // world)))
    lead = members[0]
    trains = lead.grad is not None
    wider = reduce if trains and lead.master and reduce != lead.dtype else ""
    stage = choices[lead.name].stage
    return Bucket(name, lead.dtype, stage, trains, world, part, tuple(slots), lead.master, wider)
