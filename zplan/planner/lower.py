"""Lower: the slowest correct program. Every pass starts from it."""

from collections.abc import Iterable, Sequence

from zplan.graph.ir import Graph, Op, Phase
from zplan.planner.buckets import Bucket
from zplan.planner.ownership import Ownership
from zplan.planner.program import (
    Accumulate,
    AllReduce,
    Cast,
    Free,
    Gather,
    GatherGradient,
    Instruction,
    Pack,
    Position,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
    acc,
    adds_first,
    flat,
    grad,
    gradient,
    held,
    is_chain,
    part,
    whole,
)


def lower(graph: Graph, ownership: Ownership, *, native: bool = False, position: Position = Position.ONLY) -> Program:
    """Gathers just before the first use in a phase, frees just after the last, reduces when ready.

    forward f(w); backward g(w) -> dw
        ->  gather w; wait w; run f; free w; gather w; wait w; run g; free w; pack dw; reduce dw; wait dw; update

    Views and casts of parameters are run again in each phase that reads them, just before they are first read, so
    that no phase depends on a whole parameter of the other. Masters are cast to what computes just before the gather,
    so that it carries that. `native`: the backend reduces by itself (NCCL), so stage 0
    has one all-reduce instead of the reduce-scatter and gather it is made of. Micro-batches but the
    last are added up and update nothing; at `position` evaluation there are no gradients.
    """
    forward, backward = _phases(graph)
    ready = _ready(graph, ownership, backward)
    ids = _Ids()
    body: list[Instruction] = []
    for phase in (forward, backward):
        first, last = _spans(graph, ownership, phase)
        for index, op in enumerate(phase):
            for bucket in first.get(index, ()):
                body += _assemble(ownership.bucket[bucket], ids)
            body.append(Run(op.name))
            body += [Free(whole(bucket)) for bucket in last.get(index, ())]
            if phase is backward:
                for complete in ready.get(op.name, ()):
                    body += _reduce(complete, ids, native, position)
    trained = tuple(b for b in ownership.buckets if b.trains and position is not Position.EVALUATION)
    if trained and position.updates:
        body.append(Update(tuple(bucket.name for bucket in trained)))
        body += [Free(gradient(bucket)) for bucket in trained]
    residents = _residents(graph, ownership)
    sums = tuple(acc(bucket.name) for bucket in trained)
    left = (*residents, *dict.fromkeys(graph.outputs), *(() if position.ends else sums))
    residents = (*residents, *(() if position.begins else sums))
    program = Program(graph, ownership, tuple(body), residents, left, position, native=native)
    return program.with_(_with_frees(program))


def _assemble(bucket: Bucket, ids: "_Ids") -> list[Instruction]:
    """What makes a bucket's parameters whole."""
    casts: list[Instruction] = [Cast(bucket.name)] if bucket.master else []
    if bucket.whole_at_rest:
        return casts
    launch = Gather(ids.next(), bucket.name)
    return [*casts, launch, Wait(launch.id), *([Free(part(bucket.name))] if casts else [])]


def _phases(graph: Graph) -> tuple[list[Op], list[Op]]:
    """The ops of each phase, views and casts of parameters moved to just before the first op that reads them."""
    maker = {output: op for op in graph.ops if is_chain(graph, op) for output in op.outputs}
    phases: dict[Phase, list[Op]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    made: dict[Phase, set[str]] = {Phase.FORWARD: set(), Phase.BACKWARD: set()}

    def emit(name: str, phase: Phase) -> None:
        todo = [name]
        while todo:
            op = maker.get(todo[-1])
            if op is None or op.name in made[phase]:
                todo.pop()
                continue
            missing = [each for each in op.inputs if each in maker and maker[each].name not in made[phase]]
            if missing:
                todo += reversed(missing)
                continue
            made[phase].add(op.name)
            phases[phase].append(op)

    for op in graph.ops:
        if is_chain(graph, op):
            continue
        for name in op.inputs:
            emit(name, op.phase)
        phases[op.phase].append(op)
    for tensor in graph.tensors:
        if tensor.grad is not None:
            emit(tensor.grad, Phase.BACKWARD)
    for name in graph.outputs:
        emit(name, Phase.FORWARD)
    return phases[Phase.FORWARD], phases[Phase.BACKWARD]


def _spans(
    graph: Graph, ownership: Ownership, phase: Sequence[Op]
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """For each index of a phase, the buckets first read there and those last read there."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, op in enumerate(phase):
        for name in op.inputs:
            for tensor in sorted(graph.derived.get(name, ())):
                bucket = ownership.home[tensor]
                if not ownership.bucket[bucket].at_hand:
                    first.setdefault(bucket, index)
                    last[bucket] = index
    return _invert(first), _invert(last)


def _ready(graph: Graph, ownership: Ownership, backward: Sequence[Op]) -> dict[str, list[Bucket]]:
    """Op name -> the buckets whose last gradient it makes."""
    made = {output: index for index, op in enumerate(backward) for output in op.outputs}
    last: dict[str, int] = {}
    for tensor in graph.tensors:
        if tensor.grad is not None:
            bucket = ownership.home[tensor.name]
            # A gradient that forward already made is ready when backward begins.
            last[bucket] = max(last.get(bucket, 0), made.get(tensor.grad, 0))
    ready: dict[str, list[Bucket]] = {}
    for bucket, index in sorted(last.items(), key=lambda item: item[1]):
        ready.setdefault(backward[index].name, []).append(ownership.bucket[bucket])
    return ready


def _reduce(bucket: Bucket, ids: "_Ids", native: bool, position: Position) -> list[Instruction]:
    """What becomes of a bucket's gradients when they are there."""
    name = bucket.name
    added: list[Instruction] = [Accumulate(name)]
    if adds_first(bucket):
        if not position.updates:
            return [Pack(name), *added, Free(flat(name))]
        before = [] if position is Position.ONLY else [*added, Free(acc(name))]
        return [Pack(name), *before, *_over_ranks(bucket, ids, native)]
    reduced = [Pack(name), *_over_ranks(bucket, ids, native)]
    if position is Position.ONLY:
        return reduced
    return [*reduced, *added, Free(acc(name) if position.updates else grad(name))]


def _over_ranks(bucket: Bucket, ids: "_Ids", native: bool) -> list[Instruction]:
    name = bucket.name
    if bucket.world == 1:
        return []
    if bucket.state_whole and native:
        reduce = AllReduce(ids.next(), name)
        return [reduce, Wait(reduce.id), Free(flat(name))]
    scatter = ReduceScatter(ids.next(), name)
    scattered: list[Instruction] = [scatter, Wait(scatter.id), Free(flat(name))]
    if not bucket.state_whole:
        return scattered
    gather = GatherGradient(ids.next(), name)
    return [*scattered, gather, Wait(gather.id), Free(grad(name))]


def _residents(graph: Graph, ownership: Ownership) -> tuple[str, ...]:
    return (*map(held, ownership.buckets), *graph.buffers, *graph.constants, *graph.batch)


def _with_frees(program: Program) -> tuple[Instruction, ...]:
    """Frees every value of the graph just after the last instruction that reads it, before a bucket's own free."""
    graph = program.graph
    keep = {*program.entry, *program.exit, *graph.tensor}
    made: dict[str, int] = {}
    until: dict[tuple[str, int], int] = {}
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            op = graph.op[instruction.op]
            reads: Iterable[str] = op.inputs
        elif isinstance(instruction, Pack):
            slots = program.bucket(instruction.bucket).slots
            reads = [name for slot in slots if (name := graph.tensor[slot.tensor].grad) is not None]
            op = None
        else:
            continue
        for name in reads:
            if name in made:
                until[name, made[name]] = index
        for name in op.outputs if op is not None else ():
            if name not in keep:
                made[name] = index
                until[name, index] = index
    dying: dict[int, list[str]] = {}
    for (name, _), index in until.items():
        dying.setdefault(index, []).append(name)
    instructions: list[Instruction] = []
    for index, instruction in enumerate(program.instructions):
        instructions.append(instruction)
        instructions += [Free(name) for name in dying.get(index, ())]
    return tuple(instructions)


def _invert(where: dict[str, int]) -> dict[int, list[str]]:
    inverted: dict[int, list[str]] = {}
    for name, index in where.items():
        inverted.setdefault(index, []).append(name)
    return inverted


class _Ids:
    """Counts collectives in the order in which they are launched."""

    def __init__(self) -> None:
        self._last = -1

    def next(self) -> int:
        self._last += 1
        return self._last
