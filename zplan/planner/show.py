"""Show: programs and plans as text. ASCII, the same for the same plan, and a page at any depth of the model."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from zplan.graph.ir import Tensor
from zplan.planner.buckets import Bucket
from zplan.planner.certificate import Certificate, lowest
from zplan.planner.choices import unused
from zplan.planner.fold import Block, Row, families, fold, in_order, span, template
from zplan.planner.memory import Alive, Memory
from zplan.planner.ownership import Ownership
from zplan.planner.program import LAUNCHES, REDUCTIONS, Free, Gather, Instruction, Position, Program, Run, Wait, makes
from zplan.planner.rows import ROOT, VERBS, bucket_names, holds, make_module_rows, make_rows, typed, where
from zplan.planner.spec import Spec
from zplan.planner.traffic import Traffic
from zplan.units import ITEMSIZE, format_bytes, format_count

if TYPE_CHECKING:
    from zplan.planner.plan import Plan

# Rows longer than this push their own bytes to the right, not everybody's.
WIDEST = 96
# Storages named at the peak, and intervals of a tensor written out.
LARGEST = 6
# Lines of a schedule that are still read as one page.
PAGE = 150
INTERVALS = 2
MEANING = {
    "part": "part = this rank's share of the parameters",
    "whole": "whole = the parameters",
    "flat": "flat = this rank's gradients",
    "grad": "grad = this rank's share of the averaged gradients",
    "total": "total = the averaged gradients, whole",
    "acc": "acc = the gradients of the micro-batches so far",
}


def schedule_text(
    program: Program, memory: Memory, traffic: Traffic, *, ops: bool = False, collectives: bool = False
) -> str:
    """The program, one row an instruction: index, collectives in flight, what is done, bytes alive after it.

    By default, compute folds into one row per unit of the model and phase, and equal layers fold into the first of
    them: `x12` stands beside `[`, which marks the rows that are repeated. Where that is longer than a page, collectives
    are counted in the rows of their modules, unless `collectives` asks for a row each. `ops` unfolds everything.
    """
    rows = make_rows(program, memory, traffic, ops=ops)
    blocks = [Block(i, 1, 1) for i in range(len(rows))] if ops else fold(rows)
    more = []
    if not ops and not collectives and sum(block.period for block in blocks) > PAGE:
        rows = make_module_rows(program, memory, traffic)
        blocks = fold(rows)
        more = ["", "collectives are counted in the rows of their modules: ask for them (--collectives), or for --ops"]
    header = (
        f"world={program.ownership.world} stage={_stage(program.ownership.buckets)} position={program.position.value} "
        f"resident={format_bytes(memory.resident_bytes)} peak={format_bytes(memory.peak_bytes)} "
        f"sent={format_bytes(traffic.bytes_per_rank)}"
    )
    return "\n".join([header, *_lines(rows, blocks), *(more or _legend(program)), *_totals(program, traffic)])


def _lines(rows: Sequence[Row], blocks: Sequence[Block]) -> list[str]:
    """Columns: repeats, index, collectives in flight, verb, object, bytes alive."""
    cells = []
    for block in blocks:
        for i in range(block.start, block.start + block.period):
            repeats = [rows[i + block.period * j] for j in range(block.times)]
            row, last = repeats[0], repeats[-1]
            live, then = format_bytes(row.live), format_bytes(last.live)
            after = f"-> {then}" if then != live else row.mark
            times = f"x{block.times}" if block.times > 1 and i == block.start else ""
            bracket = "[" if block.times > 1 else ""
            text = span([each.label for each in repeats]) + row.detail
            cells.append((times, bracket, str(row.first), row.flight, row.verb, text, live, after))
    if not cells:
        return []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[5] = min(widths[5], WIDEST)
    lines = []
    for cell in cells:
        times, bracket, index, flight, verb, text, live, after = map(_pad, cell, widths, "><><<<><")
        repeats_ = f"{times} {bracket} " if widths[0] else ""
        lines.append(f"{repeats_}{index} {flight} {verb}  {text}  {live} {after}".rstrip())
    return lines


def _legend(program: Program) -> list[str]:
    launches = {x.id: x for x in program.instructions if isinstance(x, LAUNCHES)}
    named = [x.value for x in program.instructions if isinstance(x, Free)]
    named += [makes(launches[x.id]) for x in program.instructions if isinstance(x, Wait)]
    kinds = {name.rpartition(":")[2] for name in named if ":" in name}
    words = [meaning for kind, meaning in MEANING.items() if kind in kinds]
    signs = ["> starts  | in flight  < waits"] if launches else []
    return ["", *signs, "; ".join(words)] if signs or words else []


def _totals(program: Program, traffic: Traffic) -> list[str]:
    counts = Counter(VERBS[type(x)] for x in program.instructions if isinstance(x, LAUNCHES))
    if not counts:
        return ["nothing is sent"]
    launched = ", ".join(f"{count} {verb}" for verb, count in counts.items())
    sent = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in traffic.by_kind.items())
    padding = f"of it padding {format_bytes(traffic.padding_nbytes)}"
    return [f"collectives: {launched}", f"sent per rank: {sent}; {padding}"]


def _stage(buckets: Iterable[Bucket]) -> str:
    stages = {bucket.stage for bucket in buckets}
    return "none" if not stages else str(stages.pop()) if len(stages) == 1 else "mixed"


def summary_text(plan: "Plan") -> str:
    """The decisions of a plan and why they were made; memory and traffic; like tensors and like buckets folded."""
    said = (*plan.graph.notes, *unused(plan.graph, plan.spec.rules))
    notes = [f"note: {span(like)}" + _times(like) for like in families(said).values()]
    parts = (_head(plan), _tensors(plan), _buckets(plan.ownership), _memory(plan.memory), _traffic(plan), notes)
    return "\n\n".join("\n".join(part) for part in parts if part)


def _head(plan: "Plan") -> list[str]:
    graph, spec = plan.graph, plan.spec
    trained = sum(tensor.numel for tensor in graph.tensors if tensor.grad is not None)
    count = sum(tensor.numel for tensor in graph.tensors)
    groups = len({group.index for group in graph.optimizer.groups})
    several = f" micro-batches={spec.micro_batches}" if spec.micro_batches > 1 else ""
    assumed = " (assumed: no optimizer was given)" if graph.optimizer.assumed else ""
    return [
        f"plan {plan.hash}: world={plan.ownership.world} stage={_stage(plan.ownership.buckets)} device={_device(plan)} "
        f"bucket={format_bytes(spec.bucket)} prefetch={spec.prefetch} depth={spec.depth}{several}",
        *_budget(plan),
        f"parameters: {format_count(count)} ({count}) in {_plural(len(graph.tensors), 'tensor')}, "
        f"{format_count(trained)} trained; {_plural(len(plan.ownership.buckets), 'bucket')}",
        f"optimizer: {graph.optimizer.name}, {_plural(groups, 'group')}{assumed}",
        *_precision(spec),
    ]


def _precision(spec: Spec) -> list[str]:
    asked = spec.precision
    if asked is None:
        return []
    others = "".join(f", {pattern}: {dtype}" for pattern, dtype in asked.modules.items())
    scaled = f"; the loss is scaled, from {asked.loss_scale:g}" if asked.scales else ""
    return [f"precision: computes in {asked.compute}{others}, reduces in {asked.reduced}, updates in fp32{scaled}"]


def _device(plan: "Plan") -> str:
    traced, runs = plan.graph.device, plan.spec.device
    return runs if runs == traced else f"{runs} (traced on {traced})"


def _budget(plan: "Plan") -> list[str]:
    """What the memory budget says, and why a stage that zplan chose was chosen."""
    lines = []
    if plan.spec.memory is not None:
        lines.append(f"budget: {format_bytes(plan.spec.memory)} a rank; {plan.certificate.verdict}")
    if plan.certificates:
        lines.append(f"auto: {chosen(plan.certificates)}")
        lines += [f"  stage {each.stage}: {_rejected(each)}" for each in plan.certificates if not each.fits]
    return lines


def chosen(certificates: Sequence[Certificate]) -> str:
    """Which stage `auto` takes, in words."""
    found = lowest(certificates)
    if found is None:
        return "no stage fits"
    if found.budget is None:
        return f"stage {found.stage}, the lowest: no memory budget was given"
    return f"stage {found.stage} is the lowest that fits {format_bytes(found.budget)}"


def _rejected(certificate: Certificate) -> str:
    alive = ", ".join(certificate.alive[:4])
    return f"{certificate.verdict}, peak {format_bytes(certificate.peak_bytes)} at {certificate.where}; alive: {alive}"


def _tensors(plan: "Plan") -> list[str]:
    """One line for all tensors that differ only in numbers of their names."""
    graph, ownership = plan.graph, plan.ownership
    several = len({tensor.group for tensor in graph.tensors if tensor.group is not None}) > 1
    members: dict[tuple[str, str, tuple[str, ...]], list[Tensor]] = {}
    for tensor in graph.tensors:
        type_ = f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
        group = ["-" if tensor.group is None else str(tensor.group)] if several else []
        facts = (type_, str(plan.choices[tensor.name].stage), *group)
        members.setdefault((_star(tensor.name), _star(_reason(plan, tensor)), facts), []).append(tensor)
    splits = Counter(family for family, _, _ in members)
    lines = [("tensor", "", "type", "stage", *(["group"] if several else []), "bucket", "owner", "because")]
    for (family, _, facts), like in members.items():
        names = [tensor.name for tensor in like]
        name = family if splits[family] == 1 and len(like) > 1 else span(names)
        buckets = bucket_names(list(dict.fromkeys(map(ownership.home.__getitem__, names))))
        reason = span([_reason(plan, tensor) for tensor in like])
        lines.append((name, _times(like).strip(), *facts, buckets, _owner(ownership, names), reason))
    return table(lines)


def _reason(plan: "Plan", tensor: Tensor) -> str:
    return "; ".join([plan.choices[tensor.name].because, *_marks(tensor)])


def _marks(tensor: Tensor) -> list[str]:
    marks = [f"tied: {', '.join(tensor.aliases[1:])}"] if len(tensor.aliases) > 1 else []
    if not tensor.trainable:
        marks.append("frozen")
    elif tensor.grad is None:
        marks.append("in no optimizer group" if tensor.group is None else "unused: no gradient")
    return marks


def _owner(ownership: Ownership, names: Sequence[str]) -> str:
    """Which ranks own which elements: written out for few ranks, as the most that one rank owns for many."""
    if all(ownership.bucket[ownership.home[name]].whole_at_rest for name in names):
        return "every rank"
    shares = [ownership.intervals(name) for name in names]
    if len(set(shares)) > 1:
        counts, ranks = sorted({len(share) for share in shares}), [each.rank for share in shares for each in share]
        count = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
        return f"{count} of r{min(ranks)}-r{max(ranks)} each"
    share = shares[0]
    if len(share) <= 1:
        return f"r{share[0].rank}" if share else "empty"
    if len(share) <= INTERVALS:
        return " ".join(f"r{each.rank} [{each.start}:{each.stop})" for each in share)
    most = max(each.stop - each.start for each in share)
    return f"r{share[0].rank}-r{share[-1].rank}, {most} at most"


def _buckets(ownership: Ownership) -> list[str]:
    members: dict[tuple[object, ...], list[Bucket]] = {}
    for bucket in ownership.buckets:
        label, _ = holds(bucket)
        kind = (_dtypes(bucket), bucket.stage, bucket.trains, bucket.part, bucket.padding, len(bucket.slots))
        members.setdefault((_star(label), *kind), []).append(bucket)
    lines = [("bucket", "", "dtype", "stage", "tensors", "bytes", "part", "padding", "holds")]
    for like in members.values():
        bucket = like[0]
        padding = format_bytes(bucket.padding * ITEMSIZE[bucket.dtype])
        size, part = format_bytes(bucket.nbytes), format_bytes(bucket.part_nbytes)
        facts = (_dtypes(bucket), str(bucket.stage), str(len(bucket.slots)), size, part, padding)
        names = bucket_names([each.name for each in like])
        lines.append((names, _times(like).strip(), *facts, span([holds(each)[0] for each in like])))
    return [*table(lines), f"fullest rank / mean: {ownership.imbalance:.2f}"] if ownership.buckets else []


def _dtypes(bucket: Bucket) -> str:
    """
    >>> _dtypes(Bucket("b0", "bf16", 3, True, 2, 64, (), "fp32", "fp32"))
    'bf16 (held in fp32, reduced in fp32)'
    """
    more = [f"held in {bucket.master}"] if bucket.master else []
    more += [f"reduced in {bucket.reduce}"] if bucket.reduce else []
    return f"{bucket.dtype} ({', '.join(more)})" if more else bucket.dtype


def _memory(memory: Memory) -> list[str]:
    categories = ", ".join(f"{category.value} {format_bytes(size)}" for category, size in memory.by_category.items())
    members: dict[tuple[object, ...], list[Alive]] = {}
    for alive in memory.alive:
        label, detail = _made(memory.program, alive)
        members.setdefault((alive.nbytes, alive.category, template(label), detail), []).append(alive)
    largest = sorted(members.values(), key=lambda like: -sum(alive.nbytes for alive in like))[:LARGEST]
    lines = []
    for like in largest:
        size = format_bytes(sum(alive.nbytes for alive in like))
        made = span(in_order(_made(memory.program, alive)[0] for alive in like)) + _made(memory.program, like[0])[1]
        since = sorted({alive.since for alive in like})
        when = "resident" if since[-1] < 0 else f"since {since[0]}" + (f"..{since[-1]}" if len(since) > 1 else "")
        lines.append((size, _times(like).strip(), like[0].category.value, when, made))
    return [
        f"memory: peak {format_bytes(memory.peak_bytes)}, resident {format_bytes(memory.resident_bytes)}",
        f"  at {where(memory.program, memory.peak_index)}",
        f"  {categories}",
        "  most of it:",
        *(f"    {line}" for line in table(lines)),
    ]


def _made(program: Program, alive: Alive) -> tuple[str, str]:
    """What a storage is: its module, and the op that made it; its own name where no op did."""
    made = program.instructions[alive.since] if alive.since >= 0 else None
    if not isinstance(made, Run) or alive.storage not in program.graph.values:
        return alive.storage, ""
    op = program.graph.op[made.op]
    return op.module or ROOT, f": {op.target}, {typed(program, alive.storage).rpartition(':')[2]}"


def _traffic(plan: "Plan") -> list[str]:
    traffic, world = plan.traffic, plan.ownership.world
    if not traffic.bytes_per_rank:
        return ["traffic: nothing is sent"]
    kinds = ", ".join(f"{k} {format_bytes(n)} ({_psi(plan, n)})" for k, n in traffic.by_kind.items())
    return [
        f"traffic per rank: {format_bytes(traffic.bytes_per_rank)} ({_psi(plan, traffic.bytes_per_rank)}), of it "
        f"padding {format_bytes(traffic.padding_nbytes)}",
        f"  {kinds}",
        f"  psi = {format_bytes(_psi_nbytes(plan))} of trained parameters, times {world - 1}/{world}",
    ]


def _psi_nbytes(plan: "Plan") -> int:
    return sum(tensor.numel * ITEMSIZE[tensor.dtype] for tensor in plan.graph.tensors if tensor.grad is not None)


def _psi(plan: "Plan", nbytes: int) -> str:
    """Bytes sent, in the unit of the ZeRO paper: times psi (N - 1) / N."""
    world = plan.ownership.world
    unit = _psi_nbytes(plan) * (world - 1) / world
    return f"{nbytes / unit:.2f} psi" if unit else "no psi"


def compare_text(plans: Sequence["Plan"]) -> str:
    """Plans side by side, one column each; below them, what each that is over its budget peaks with."""
    facts: tuple[tuple[str, Callable[[Plan], str]], ...] = (
        ("", lambda plan: f"stage {_stage(plan.ownership.buckets)}"),
        ("peak", lambda plan: format_bytes(plan.memory.peak_bytes)),
        ("resident", lambda plan: format_bytes(plan.memory.resident_bytes)),
        ("sent per rank", lambda plan: format_bytes(plan.traffic.bytes_per_rank)),
        ("in psi (N-1)/N", lambda plan: _psi(plan, plan.traffic.bytes_per_rank).removesuffix(" psi")),
        ("gathers", lambda plan: str(_number(plan, lambda x: isinstance(x, Gather)))),
        ("reductions", lambda plan: str(_number(plan, lambda x: isinstance(x, REDUCTIONS)))),
        ("predicted time", lambda plan: "not modelled yet"),
        ("fits", lambda plan: plan.certificate.verdict),
        ("peak at", lambda plan: str(plan.memory.peak_index) if plan.memory.peak_index >= 0 else "rest"),
        ("instructions", lambda plan: str(_number(plan, lambda _: True))),
    )
    lines = table([(name, *map(fact, plans)) for name, fact in facts], right=True)
    stages = {_stage(plan.ownership.buckets) for plan in plans}
    if {"1", "2"} <= stages and all(plan.program.position is Position.ONLY for plan in plans):
        lines.append("With one micro-batch, stage 1 gives gradients back bucket by bucket, as stage 2 does.")
    certificates = [plan.certificate for plan in plans]
    if any(each.budget is not None for each in certificates):
        lines += ["", f"because: {chosen(certificates)}"]
        lines += [f"  stage {each.stage}: {_rejected(each)}" for each in certificates if not each.fits]
    return "\n".join(lines)


def _number(plan: "Plan", what: Callable[[Instruction], bool]) -> int:
    counts = [(sum(map(what, program.instructions)), times) for program, times in plan.traffic.before]
    return sum(map(what, plan.program.instructions)) + sum(count * times for count, times in counts)


def _star(name: str) -> str:
    """
    >>> _star("blocks.3.attn.0.weight"), _star("annotate: blocks.3"), _star("default: stage 3")
    ('blocks.*.attn.*.weight', 'annotate: blocks.*', 'default: stage 3')
    """
    return re.sub(r"(?<=\.)\d+(?![^.,;])|^\d+(?=\.)", "*", name)


def _times(like: Sequence[object]) -> str:
    return f" x{len(like)}" if len(like) > 1 else ""


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def table(lines: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Columns as wide as their widest cell; those without any text are left out. `right`: all but the first."""
    columns = [column for column in zip(*lines, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in columns]
    aligns = ["<", *(">" if right else "<" for _ in columns[1:])]
    return ["  ".join(map(_pad, row, widths, aligns)).rstrip() for row in zip(*columns, strict=True)]


def _pad(cell: str, width: int, align: str) -> str:
    return f"{cell:{align}{width}}"
