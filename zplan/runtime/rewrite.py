"""Rewrite: a program and a traced graph become one runnable graph, instruction by instruction, in planned order.

Every instruction is one contiguous run of nodes that carry its index in `meta["instruction"]`. The runnable graph has a
single placeholder, a list of residents that it empties: nothing is held by the caller. A `Free` is a call that takes
the value for the last time, after which the generated code drops the name; what a collective had in hand is emptied.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zplan.graph.trace import Trace
from zplan.planner.buckets import Bucket, Slot
from zplan.planner.program import (
    LAUNCHES,
    AllReduce,
    Free,
    Gather,
    GatherGradient,
    Instruction,
    Launch,
    Pack,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
    flat,
    gradient,
    makes,
    takes,
    whole,
)
from zplan.runtime import comm as nodes
from zplan.runtime.comm import Comm

INSTRUCTION = "instruction"
UPDATE = "update"


def inputs(program: Program) -> tuple[str, ...]:
    """What the runnable graph takes, in order: residents, with the tensors of buckets that are whole at rest."""
    names: list[str] = []
    for value in program.entry:
        bucket = program.ownership.bucket.get(value.partition(":")[0])
        if bucket is not None and value == whole(bucket.name):
            names += [slot.tensor for slot in bucket.slots]
        else:
            names.append(value)
    return tuple(names)


def rewrite(trace: Trace, program: Program, comm: Comm, update: torch.nn.Module) -> fx.GraphModule:
    """Returns a module that takes one list (see `inputs`) and returns the graph's outputs as a tuple.

    `update` is called with the gradient of each trained bucket, in the order of the `Update` instruction.
    """
    writer = _Writer(trace, program, comm)
    for index, instruction in enumerate(program.instructions):
        writer.write(index, instruction)
    graph = writer.finish()
    module = fx.GraphModule({UPDATE: update}, graph, class_name="Step")
    graph.lint()
    return module


class _Writer:
    """Holds the node of every value that is alive."""

    def __init__(self, trace: Trace, program: Program, comm: Comm) -> None:
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

    def write(self, index: int, instruction: Instruction) -> None:
        self.index = index
        match instruction:
            case Run(op):
                self.run(op)
            case Free(value):
                self.free(value)
            case Pack(bucket):
                self.pack(self.program.bucket(bucket))
            case Gather() | ReduceScatter() | AllReduce() | GatherGradient():
                self.launch(instruction)
            case Wait(id):
                self.wait(*self.started.pop(id))
            case Update(buckets):
                grads = tuple(self.node[gradient(self.program.bucket(name))] for name in buckets)
                self._tag(self.graph.call_module(UPDATE, grads))

    def finish(self) -> fx.Graph:
        self.index = len(self.program.instructions)
        self._tag(self.graph.output(tuple(self.node[name] for name in self.program.graph.outputs)))
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

    def pack(self, bucket: Bucket) -> None:
        grads = [self.node[self._grad(slot)] for slot in bucket.slots]
        offsets = [slot.offset for slot in bucket.slots]
        self.node[flat(bucket.name)] = self.emit(nodes.pack, (grads, offsets, bucket.numel))

    def launch(self, launch: Launch) -> None:
        bucket = self.program.bucket(launch.bucket)
        source = self.node[takes(launch)]
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
        match launch:
            case ReduceScatter() if not self.native:
                received, node = node, self.emit(nodes.mean_in_rank_order, (node, bucket.world))
                self.emit(self.retire, (received,))
            case ReduceScatter() | AllReduce():
                node = self.emit(nodes.mean_in_place, (node, bucket.world))
            case Gather():
                for slot in bucket.slots:
                    if slot.tensor in self.read[self.index]:
                        self.node[slot.tensor] = self._view(node, slot)
        self.node[makes(launch)] = node

    # Nodes

    def emit(self, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        return self._tag(self.graph.call_function(target, args))

    def _tag(self, node: fx.Node) -> fx.Node:
        node.meta[INSTRUCTION] = self.index
        return node

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


def _tensors_read(program: Program) -> Mapping[int, frozenset[str]]:
    """For the index of each wait that ends a gather, the tensors that are read until the bucket is freed."""
    gathers = {x.id: x.bucket for x in program.instructions if isinstance(x, Gather)}
    home = program.ownership.home
    found: dict[int, set[str]] = {}
    opened: dict[str, int] = {}
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Wait) and instruction.id in gathers:
            opened[gathers[instruction.id]] = index
            found[index] = set()
        elif isinstance(instruction, Run):
            for name in program.graph.op[instruction.op].inputs:
                if name in home and home[name] in opened:
                    found[opened[home[name]]].add(name)
    return {index: frozenset(names) for index, names in found.items()}
