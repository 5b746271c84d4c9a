"""Rows: a program as the lines of its printed schedule, not yet folded over layers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from zplan.graph.ir import Op, Phase
from zplan.planner.buckets import Bucket, unit_of
from zplan.planner.fold import Row, families, span
from zplan.planner.memory import Memory
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
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
    acc,
    cast,
    is_chain,
    makes,
)
from zplan.planner.traffic import Traffic
from zplan.units import ITEMSIZE, format_bytes

VERBS: Mapping[type, str] = {
    Cast: "cast",
    Gather: "gather",
    ReduceScatter: "reduce-scatter",
    AllReduce: "all-reduce",
    GatherGradient: "gather-grad",
    Wait: "wait",
    Run: "run",
    Pack: "pack",
    Accumulate: "accumulate",
    Free: "free",
    Update: "update",
}
ROOT = "(root)"
# A bucket over more units than this is named by its first and last.
UNITS_NAMED = 3


def make_rows(program: Program, memory: Memory, traffic: Traffic, *, ops: bool) -> list[Row]:
    """One row an instruction (`ops`), or one for each run of compute in one unit of the model and one phase.

    Frees of values of the graph go with the compute before them; those of buckets have rows of their own.
    """
    runs = _runs(program)
    launches = {x.id: x for x in program.instructions if isinstance(x, LAUNCHES)}
    rows: list[Row] = []
    group: list[int] = []
    flying = 0

    def close() -> None:
        if group:
            label, detail = _group(program, [program.instructions[i] for i in group], runs.get(group[0], ""))
            add(group[0], group[-1], "", label, detail)
            group.clear()

    def add(first: int, last: int, sign: str, label: str, detail: str) -> None:
        live, mark = memory.timeline[last], ""
        if first <= memory.peak_index <= last:
            live, mark = memory.peak_bytes, "<- peak"
            if first < memory.peak_index:
                mark += f" at {memory.peak_index} {_name(program.instructions[memory.peak_index])}"
        verb = VERBS[type(program.instructions[first])]
        rows.append(
            Row(first, last, "|" * flying + sign, verb, label, detail, traffic.by_instruction[first], live, mark)
        )

    for index, instruction in enumerate(program.instructions):
        if not ops and _joins(program, instruction, group, runs, index):
            group.append(index)
            continue
        close()
        if not ops and _is_compute(program, instruction):
            group.append(index)
            continue
        label, detail = _row(program, instruction, launches)
        if isinstance(instruction, Wait):
            flying -= 1
            add(index, index, "<", label, detail)
        elif isinstance(instruction, LAUNCHES):
            add(index, index, ">", label, detail)
            flying += 1
        else:
            add(index, index, "", label, detail)
    close()
    return rows


def make_module_rows(program: Program, memory: Memory, traffic: Traffic) -> list[Row]:
    """One row for each stretch of instructions between changes of unit or phase, collectives counted in it.

    For programs whose layers take many buckets each, so that rows of single collectives fill pages.
    """
    runs = _runs(program)
    spans: list[tuple[str, int]] = []
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Update):
            spans.append(("", index))
        elif index in runs and (not spans or spans[-1][0] != runs[index]):
            # What stands before the first run goes with it.
            spans.append((runs[index], index if spans else 0))
    rows = []
    ends = [start for _, start in spans[1:]] + [len(program.instructions)]
    for (label, first), end in zip(spans, ends, strict=True):
        counts = Counter(VERBS[type(x)] for x in program.instructions[first:end] if not _is_plain_free(program, x))
        of_run = counts.pop("run", 0)
        detail = ", ".join(
            [_plural(of_run, "op")] * (of_run > 0)
            + [f"{counts[verb]} {verb}" for verb in VERBS.values() if counts[verb]]
        )
        live, mark = memory.timeline[end - 1], ""
        if first <= memory.peak_index < end:
            live, mark = memory.peak_bytes, f"<- peak at {memory.peak_index}"
        sent = sum(traffic.by_instruction[first:end])
        verb = "run" if label else "update"
        rows.append(Row(first, end - 1, "", verb, label, f" ({detail})" if label else detail, sent, live, mark))
    return rows


def bucket_names(names: Sequence[str]) -> str:
    """
    >>> bucket_names(["b0", "b1", "b2"]), bucket_names(["b0", "b2"]), bucket_names(["b7"])
    ('b0..2', 'b0,2', 'b7')
    """
    return " ".join(span(family) for family in families(names).values())


def holds(bucket: Bucket) -> tuple[str, str]:
    """What a bucket is made of: a name, and the facts that follow it.

    One tensor: `wte.weight`, `:fp32[256,384]`. More: `blocks.2.*`, ` (12 tensors, 27 MiB)`.
    """
    names = [slot.tensor for slot in bucket.slots]
    if len(names) == 1:
        return names[0], f":{bucket.dtype}[{','.join(map(str, bucket.slots[0].shape))}]"
    units = dict.fromkeys(map(unit_of, names))
    if len(units) == 1:
        label = ".".join([*_common(name.split(".")[:-1] for name in names), "*"])
    else:
        spans = _spans(units)
        label = ", ".join(spans) if len(spans) <= UNITS_NAMED else f"{spans[0]}, ..., {spans[-1]}"
    return label, f" ({len(names)} tensors, {format_bytes(bucket.nbytes)})"


def _spans(units: Iterable[str]) -> list[str]:
    """Units that follow one another by number, as one: `blocks.0..3`."""
    spans: list[list[str]] = []
    for unit in units:
        stem, _, number = unit.rpartition(".")
        before_stem, _, before = spans[-1][-1].rpartition(".") if spans else ("", "", "")
        if number.isdigit() and before.isdigit() and stem == before_stem and int(number) == int(before) + 1:
            spans[-1].append(unit)
        else:
            spans.append([unit])
    return [span(each) if len(each) > 1 else each[0] or ROOT for each in spans]


def _common(paths: Iterable[list[str]]) -> list[str]:
    """The longest beginning of all paths."""
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared


def where(program: Program, index: int) -> str:
    """An instruction in words, for a line of its own."""
    if index < 0:
        return "at rest, between steps"
    instruction = program.instructions[index]
    launches = {x.id: x for x in program.instructions if isinstance(x, LAUNCHES)}
    if not isinstance(instruction, Run):
        label, detail = _row(program, instruction, launches)
        return f"{index} {VERBS[type(instruction)]} {label}{detail}"
    op = program.graph.op[instruction.op]
    line = f", {op.line}" if op.line else ""
    phase = _phase(program, op, index, program.instructions.index(instruction))
    return f"{index} run {op.name} ({op.target} in {op.module or ROOT}, {phase}{line})"


def _is_compute(program: Program, instruction: Instruction) -> bool:
    """What a group may begin with."""
    return isinstance(instruction, (Run, Pack)) or _is_plain_free(program, instruction)


def _is_plain_free(program: Program, instruction: Instruction) -> bool:
    if not isinstance(instruction, Free):
        return False
    name, colon, _ = instruction.value.partition(":")
    return not colon or name not in program.ownership.bucket


def _joins(
    program: Program, instruction: Instruction, group: Sequence[int], runs: Mapping[int, str], index: int
) -> bool:
    if not group:
        return False
    if isinstance(instruction, Run):
        return runs.get(group[0]) == runs[index]
    return _is_plain_free(program, instruction)


def _group(program: Program, instructions: Sequence[Instruction], run: str) -> tuple[str, str]:
    first = instructions[0]
    if isinstance(first, Pack):
        return first.bucket, f" ({_plural(len(program.bucket(first.bucket).slots), 'gradient')})"
    if isinstance(first, Free):
        return "", _plural(len(instructions), "value")
    return run, f" ({_plural(sum(isinstance(x, Run) for x in instructions), 'op')})"


def _runs(program: Program) -> dict[int, str]:
    """Index of each run -> its unit and phase: `blocks.3 forward`.

    Ops of no module between ops of one unit (sums of gradients, views made by autograd) count as that unit's.
    """
    first: dict[str, int] = {}
    found: list[tuple[int, str, str]] = []
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            op = program.graph.op[instruction.op]
            phase = _phase(program, op, index, first.setdefault(op.name, index))
            found.append((index, _unit(program, op), phase))
    following = ("", "")
    after = []
    for _, unit, phase in reversed(found):
        after.append(following)
        following = (unit, phase) if unit else following
    before = ("", "")
    runs: dict[int, str] = {}
    for (index, unit, phase), then in zip(found, reversed(after), strict=True):
        if unit:
            before = (unit, phase)
        elif before == then == (before[0], phase):
            unit = before[0]
        runs[index] = f"{unit or ROOT} {phase}"
    return runs


def _unit(program: Program, op: Op) -> str:
    """The op's unit; for a view or cast of parameters that no module made, the unit of the first of them."""
    if not op.module and is_chain(program.graph, op):
        return unit_of(min(program.graph.derived[op.outputs[0]]))
    return unit_of(f"{op.module}.")


def _phase(program: Program, op: Op, index: int, first: int) -> str:
    """`recompute`: a second run of a forward op. Views and casts of parameters belong to the phase they run in."""
    if op.phase is Phase.BACKWARD:
        return Phase.BACKWARD.value
    if is_chain(program.graph, op):
        return Phase.BACKWARD.value if index >= program.boundary else Phase.FORWARD.value
    return "recompute" if index > first else Phase.FORWARD.value


def _row(program: Program, instruction: Instruction, launches: Mapping[int, Launch]) -> tuple[str, str]:
    """Label and detail of one instruction."""
    match instruction:
        case Gather(_, name):
            label, detail = holds(program.bucket(name))
            return f"{name} = {label}", detail
        case ReduceScatter(_, name) | AllReduce(_, name) | GatherGradient(_, name):
            bucket = program.bucket(name)
            wire = f"{bucket.wire}, " if bucket.wire != bucket.dtype else ""
            return name, f" ({wire}{format_bytes(bucket.numel * ITEMSIZE[bucket.wire])})"
        case Cast(name):
            bucket = program.bucket(name)
            return cast(bucket), f" ({bucket.master} -> {bucket.dtype})"
        case Wait(id):
            return makes(launches[id]), ""
        case Pack(name):
            return name, f" ({_plural(len(program.bucket(name).slots), 'gradient')})"
        case Accumulate(name):
            return acc(name), ""
        case Free(value):
            return value, ""
        case Update(names):
            return bucket_names(names), f" ({_plural(len(names), 'bucket')})"
        case Run(name):
            op = program.graph.op[name]
            arguments = "; ".join(filter(None, (", ".join(op.inputs), op.literals)))
            outputs = ", ".join(typed(program, value) for value in op.outputs) or "()"
            return f"{op.name} = {op.target}({arguments}) -> {outputs}", ""


def typed(program: Program, value: str) -> str:
    """`addmm_3:fp32[64,192]`"""
    made = program.graph.values[value]
    return f"{value}:{made.dtype}[{','.join(map(str, made.shape))}]"


def _name(instruction: Instruction) -> str:
    return instruction.op if isinstance(instruction, Run) else VERBS[type(instruction)]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
