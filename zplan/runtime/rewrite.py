"""Rewrite: a program and a traced graph become one runnable graph, instruction by instruction, in planned order.

Every instruction is one contiguous run of nodes that carry its index in `meta["instruction"]`. The runnable graph has a
single placeholder, a list of residents that it empties: nothing is held by the caller. A `Free` is a call that takes
the value for the last time, after which the generated code drops the name; what a collective had in hand is emptied.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zplan.graph.lift import dtype_of
from zplan.graph.trace import Trace
from zplan.planner.buckets import Bucket, Slot
from zplan.planner.program import (
    LAUNCHES,
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
    adds,
    adds_first,
    cast,
    flat,
    gradient,
    makes,
    master,
    takes,
    whole,
)
from zplan.runtime import comm as nodes
from zplan.runtime.comm import Comm

INSTRUCTION = "instruction"
UPDATE = "update"


@dataclass(frozen=True)
class Ready:
    """A program that can run: it takes `inputs` and gives the outputs of its graph, and `carried`."""

    program: Program
    module: fx.GraphModule
    inputs: tuple[str, ...]
    carried: tuple[str, ...] = ()


def inputs(program: Program) -> tuple[str, ...]:
    """What the runnable graph takes, in order: residents, with the tensors of buckets that are whole at rest.

    What an earlier micro-batch left comes under the names of `carried`.
    """
    names: list[str] = []
    for value in program.entry:
        bucket = program.ownership.bucket.get(value.partition(":")[0])
        if bucket is not None and value == whole(bucket.name) and bucket.at_hand:
            names += [slot.tensor for slot in bucket.slots]
        else:
            names.append(value)
    return tuple(names)


def carried(program: Program) -> tuple[str, ...]:
    """What a micro-batch leaves for the next one: sums of gradients, and parameters that are kept whole."""
    buckets = program.ownership.buckets
    names = {acc(b.name) for b in buckets} | {whole(b.name) for b in buckets if not b.at_hand}
    return tuple(name for name in program.exit if name in names)


def rewrite(
    trace: Trace,
    program: Program,
    comm: Comm,
    update: torch.nn.Module,
    micro_batches: Callable[[], int] = lambda: 1,
) -> fx.GraphModule:
    """Returns a module that takes one list (see `inputs`) and returns the graph's outputs and `carried`, as a tuple.

    `update` is called with the gradient of each trained bucket, in the order of the `Update` instruction.
    `micro_batches` is asked when the last of them is added up.
    """
    writer = _Writer(trace, program, comm, micro_batches)
    for index, instruction in enumerate(program.instructions):
        writer.write(index, instruction)
    graph = writer.finish()
    module = fx.GraphModule({UPDATE: update}, graph, class_name="Step")
    graph.lint()
    return module


class _Writer:
    """Holds the node of every value that is alive."""

    def __init__(self, trace: Trace, program: Program, comm: Comm, micro_batches: Callable[[], int]) -> None:
        self.program = program
        self.comm = comm
        self.trace = trace
        self.native = program.native
        self.graph = fx.Graph()
        self.node: dict[str, fx.Node] = {}
        self.started: dict[int, tuple[Launch, fx.Node]] = {}
        self.repeated: dict[int, fx.Node] = {}
        self.index = -1
        self.value_of: Mapping[fx.Node, str] = {node: value for value, node in trace.node.items()}
        self.read = _tensors_read(program)
        self.copied: dict[fx.Node, fx.Node] = {}
        self.retire = _retire(comm)
        self.micro_batches = micro_batches
        # What gloo's thread may still hold when it is freed; see `Comm`.
        self.handed = frozenset[str]()
        if not self.native:
            launches = [x for x in program.instructions if isinstance(x, LAUNCHES)]
            made = {makes(launch) for launch in launches if not isinstance(launch, ReduceScatter)}
            self.handed = frozenset({takes(x) for x in launches if isinstance(x, ReduceScatter)} | made)
        boxed = self.graph.placeholder("residents")
        for i, name in enumerate(inputs(program)):
            self.node[name] = self.emit(operator.getitem, (boxed, i))
        self._tag(self.graph.call_method("clear", (boxed,)))
        for bucket in program.ownership.buckets:
            if not bucket.at_hand and whole(bucket.name) in self.node:
                self._views(bucket, self.node[whole(bucket.name)])

    def write(self, index: int, instruction: Instruction) -> None:
        self.index = index
        match instruction:
            case Run(op):
                self.run(op)
            case Free(value):
                self.free(value)
            case Cast(bucket):
                self.cast(self.program.bucket(bucket))
            case Pack(bucket):
                self.pack(self.program.bucket(bucket))
            case Accumulate(bucket):
                self.accumulate(self.program.bucket(bucket))
            case Gather() | ReduceScatter() | AllReduce() | GatherGradient():
                self.launch(instruction)
            case Wait(id):
                self.wait(*self.started.pop(id))
            case Update(buckets):
                grads = tuple(self.node[gradient(self.program.bucket(name))] for name in buckets)
                self._tag(self.graph.call_module(UPDATE, grads))

    def finish(self) -> fx.Graph:
        self.index = len(self.program.instructions)
        names = (*self.program.graph.outputs, *carried(self.program))
        self._tag(self.graph.output(tuple(self.node[name] for name in names)))
        return self.graph

    # One method an instruction

    def run(self, name: str) -> None:
        for original in self.trace.op_nodes[name]:
            copy = self._tag(self.graph.node_copy(original, self._argument))
            value = self.value_of.get(original)
            if value is None:
                self.copied[original] = copy
            else:
                self.node[value] = copy

    def free(self, value: str) -> None:
        dying = [self.node.pop(value)]
        bucket = self.program.ownership.bucket.get(value.partition(":")[0])
        if bucket is not None and value == whole(bucket.name):
            dying += [self.node.pop(slot.tensor) for slot in bucket.slots if slot.tensor in self.node]
        if value in self.handed:
            self.emit(self.retire, (dying.pop(0),))
        if dying:
            self.emit(nodes.release, tuple(dying))

    def cast(self, bucket: Bucket) -> None:
        made = self.emit(nodes.cast, (self.node[master(bucket.name)], dtype_of(bucket.dtype)))
        self.node[cast(bucket)] = made
        if bucket.whole_at_rest:
            self._views(bucket, made)

    def pack(self, bucket: Bucket) -> None:
        grads = [self.node[self._grad(slot)] for slot in bucket.slots]
        offsets = [slot.offset for slot in bucket.slots]
        self.node[flat(bucket.name)] = self.emit(nodes.pack, (grads, offsets, bucket.numel, dtype_of(bucket.wire)))

    def accumulate(self, bucket: Bucket) -> None:
        value, sums = self.node[adds(bucket)], acc(bucket.name)
        match self.program.position:
            case Position.FIRST:
                self.node[sums] = self.emit(nodes.accumulate_first, (value,))
            case Position.MIDDLE:
                self.node[sums] = self.emit(nodes.accumulate, (value, self.node[sums]))
            case _:
                divide = self.divide(bucket, reduced=bucket.world == 1 or not adds_first(bucket))
                self.node[adds(bucket)] = self.emit(divide.last, (value, self.node[sums]))

    def launch(self, launch: Launch) -> None:
        bucket = self.program.bucket(launch.bucket)
        source = self.node[takes(launch)]
        if self._divides_before(launch):
            self.emit(_Division(bucket.world, lambda: 1).before, (source,))
        match launch:
            case Gather() | GatherGradient() if self.native:
                node = nodes.start_gather(self.emit, self.comm, source)
            case Gather() | GatherGradient():
                repeated = self.emit(torch.ops.aten.repeat.default, (source, [bucket.world]))
                self.repeated[launch.id] = repeated
                node = nodes.start_exchange(self.emit, self.comm, repeated, bucket.part)
            case ReduceScatter() if self.native:
                node = nodes.start_reduce_scatter(self.emit, self.comm, source)
            case ReduceScatter():
                node = nodes.start_exchange(self.emit, self.comm, source, bucket.part)
            case AllReduce():
                node = nodes.start_all_reduce(self.emit, self.comm, source)
        self.started[launch.id] = (launch, node)

    def wait(self, launch: Launch, started: fx.Node) -> None:
        node = nodes.finish(self.emit, started)
        if launch.id in self.repeated:
            self.emit(self.retire, (self.repeated.pop(launch.id),))
        bucket = self.program.bucket(launch.bucket)
        # Gradients that are added up after their reduction stay a sum, in fp32, until then.
        adds_up = self.program.position is not Position.ONLY and not adds_first(bucket)
        # What goes over the wire once more keeps its dtype; the update reads that of the masters.
        last = bucket.wire if isinstance(launch, ReduceScatter) and bucket.state_whole else bucket.held
        match launch:
            case ReduceScatter() if not self.native:
                received, of = node, (node, bucket.world)
                if adds_up:
                    node = self.emit(nodes.sum_in_rank_order, of)
                else:
                    node = self.emit(self.divide(bucket).in_rank_order, (*of, dtype_of(last)))
                self.emit(self.retire, (received,))
            case ReduceScatter() | AllReduce() if adds_up:
                node = self.emit(_widened, (node,))
            case ReduceScatter() | AllReduce():
                node = self.emit(self.divide(bucket).in_place, (node, dtype_of(last)))
            case GatherGradient() if last != bucket.wire:
                received, node = node, self.emit(nodes.cast, (node, dtype_of(last)))
                self.emit(self.retire, (received,))
            case Gather():
                self._views(bucket, node)
        self.node[makes(launch)] = node

    def divide(self, bucket: Bucket, *, reduced: bool = True) -> "_Division":
        """What is left to divide by, once gradients are reduced over ranks or just before.

        One division at the end; but fp16, which may not hold a sum, is divided by the micro-batches before it travels,
        and by the ranks before a backend adds them up.
        """
        early = bucket.wire == "fp16"
        first = self.program.position is not Position.ONLY and adds_first(bucket) and bucket.world > 1
        times = early if not reduced else not (early and first)
        ranks = 1 if not reduced or (early and self.native) else bucket.world
        return _Division(ranks, self.micro_batches if times else lambda: 1)

    def _divides_before(self, launch: Launch) -> bool:
        """Whether gradients are divided by the ranks before a backend adds them up: fp16 may not hold the sum."""
        reduces = isinstance(launch, (ReduceScatter, AllReduce))
        return self.native and reduces and self.program.bucket(launch.bucket).wire == "fp16"

    # Nodes

    def emit(self, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        return self._tag(self.graph.call_function(target, args))

    def _tag(self, node: fx.Node) -> fx.Node:
        node.meta[INSTRUCTION] = self.index
        return node

    def _views(self, bucket: Bucket, flat: fx.Node) -> None:
        """Of the tensors that are read while the bucket is whole."""
        for slot in bucket.slots:
            if slot.tensor in self.read[bucket.name, self.index]:
                self.node[slot.tensor] = self._view(flat, slot)

    def _view(self, flat: fx.Node, slot: Slot) -> fx.Node:
        args = (flat, list(slot.shape), _contiguous(slot.shape), slot.offset)
        return self.emit(torch.ops.aten.as_strided.default, args)

    def _grad(self, slot: Slot) -> str:
        name = self.program.graph.tensor[slot.tensor].grad
        assert name is not None, slot.tensor
        return name

    def _argument(self, original: fx.Node) -> fx.Node:
        value = self.value_of.get(original)
        return self.copied[original] if value is None else self.node[value]


def _retire(comm: Comm) -> Callable[..., None]:
    def retire(*tensors: torch.Tensor) -> None:
        comm.retire(*tensors)

    return retire


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(1, shape[i + 1])
    return strides


class _Division:
    """By some ranks, and by the micro-batches of a step, whose number is known when it runs."""

    def __init__(self, ranks: int, micro_batches: Callable[[], int]) -> None:
        self.ranks = ranks
        self.micro_batches = micro_batches

    @property
    def count(self) -> int:
        return self.ranks * self.micro_batches()

    def in_rank_order(self, received: torch.Tensor, world: int, dtype: torch.dtype) -> torch.Tensor:
        return nodes.mean_in_rank_order(received, world, self.count, dtype)

    def in_place(self, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return total.div_(self.count).to(dtype)

    def before(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.div_(self.count)

    def last(self, value: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        return nodes.accumulate_last(value, sums, self.count)


def _widened(total: torch.Tensor) -> torch.Tensor:
    return total.to(nodes.wider(total.dtype))


def _tensors_read(program: Program) -> Mapping[tuple[str, int], frozenset[str]]:
    """The tensors that are read while a bucket is whole, by its name and the index of what makes it so (-1: it is so at
    entry)."""
    gathers = {x.id: x.bucket for x in program.instructions if isinstance(x, Gather)}
    home = program.ownership.home
    opened = {b.name: -1 for b in program.ownership.buckets if not b.at_hand and whole(b.name) in program.entry}
    found: dict[tuple[str, int], set[str]] = {(name, -1): set() for name in opened}
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Wait) and instruction.id in gathers:
            opened[gathers[instruction.id]] = index
            found[gathers[instruction.id], index] = set()
        elif isinstance(instruction, Cast) and program.bucket(instruction.bucket).whole_at_rest:
            opened[instruction.bucket] = index
            found[instruction.bucket, index] = set()
        elif isinstance(instruction, Run):
            for name in program.graph.op[instruction.op].inputs:
                if name in home and home[name] in opened:
                    found[home[name], opened[home[name]]].add(name)
    return {where: frozenset(names) for where, names in found.items()}
