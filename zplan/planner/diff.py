"""Diff: where two plans part: what was asked for, what each tensor got, what runs, and what it costs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from zplan.graph.ir import Graph, Tensor
from zplan.planner.buckets import Bucket
from zplan.planner.fold import families, span
from zplan.planner.plan import Plan
from zplan.planner.program import Program
from zplan.planner.rows import VERBS, where
from zplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class Change:
    """`what` is `before` in the first plan and `after` in the second; "-" where it is not there."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Diff:
    """Changes by section; false where there is none."""

    asked: tuple[Change, ...]
    model: tuple[Change, ...]
    tensors: tuple[Change, ...]
    buckets: tuple[Change, ...]
    program: tuple[Change, ...]
    costs: tuple[Change, ...]

    def __bool__(self) -> bool:
        return any((self.asked, self.model, self.tensors, self.buckets, self.program, self.costs))

    def __str__(self) -> str:
        if not self:
            return "the plans are the same"
        return "\n".join(self._lines())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def _lines(self) -> Iterator[str]:
        for section in self.__slots__:
            changes: tuple[Change, ...] = getattr(self, section)
            if not changes:
                continue
            yield f"{section}:"
            alike: dict[tuple[str, str], list[str]] = {}
            for change in changes:
                alike.setdefault((change.before, change.after), []).append(change.what)
            for (before, after), names in alike.items():
                for like in families(names).values():
                    times = f" x{len(like)}" if len(like) > 1 else ""
                    yield f"  {span(like)}{times}: {before} -> {after}"


def diff(one: Plan, two: Plan) -> Diff:
    return Diff(
        asked=tuple(_fields(one.spec.model_dump(), two.spec.model_dump())),
        model=tuple(_model(one.graph, two.graph)),
        tensors=tuple(_tensors(one, two)),
        buckets=tuple(_buckets(one, two)),
        program=tuple(change for pair in zip_longest(one.programs, two.programs) for change in _program(*pair)),
        costs=tuple(_costs(one, two)),
    )


def unlike(one: Graph, two: Graph) -> tuple[Change, ...]:
    """What makes two graphs those of different models: names, ties, shapes and dtypes of parameters. () : the same."""

    def facts(graph: Graph) -> dict[str, str]:
        return {t.name: f"{t.dtype}{list(t.shape)}" + _held(t) + _tied(t.aliases) for t in graph.tensors}

    return tuple(_fields(facts(one), facts(two)))


def _held(tensor: Tensor) -> str:
    return f" held in {tensor.master}" if tensor.master else ""


def _tied(aliases: tuple[str, ...]) -> str:
    return f" tied with {', '.join(aliases[1:])}" if len(aliases) > 1 else ""


def _fields(one: dict[str, Any], two: dict[str, Any]) -> Iterator[Change]:
    for name in dict.fromkeys((*one, *two)):
        before, after = one.get(name, "-"), two.get(name, "-")
        if before != after:
            yield Change(name, str(before), str(after))


def _model(one: Graph, two: Graph) -> Iterator[Change]:
    yield from unlike(one, two)
    if one.hash == two.hash:
        return
    yield from _fields({"device": one.device}, {"device": two.device})
    yield from _fields(_optimizer(one), _optimizer(two))

    def batch(graph: Graph) -> dict[str, str]:
        return {name: f"{graph.values[name].dtype}{list(graph.values[name].shape)}" for name in graph.batch}

    yield from _fields(batch(one), batch(two))
    yield from _fields({"ops": len(one.ops)}, {"ops": len(two.ops)})
    for index, (a, b) in enumerate(zip_longest(one.ops, two.ops)):
        first, second = (f"{op.target}({op.literals})" if op else "-" for op in (a, b))
        if first != second:
            yield Change(f"first op that differs, {index}", first, second)
            return
    for name, value in one.values.items():
        other = two.values.get(name)
        if other is not None and (value.shape, value.dtype) != (other.shape, other.dtype):
            made = (f"{each.dtype}{list(each.shape)}" for each in (value, other))
            yield Change(f"first value that differs, {name}", *made)
            return


def _optimizer(graph: Graph) -> dict[str, str]:
    facts = {"optimizer": graph.optimizer.name}
    return facts | {f"optimizer group {group.index}, {group.dtype}": group.options for group in graph.optimizer.groups}


def _tensors(one: Plan, two: Plan) -> Iterator[Change]:
    def facts(plan: Plan) -> dict[str, Any]:
        return {name: (choice.stage, choice.because) for name, choice in plan.choices.items()}

    before, after = facts(one), facts(two)
    for name in dict.fromkeys((*before, *after)):
        if before.get(name, ("", ""))[0] == after.get(name, ("", ""))[0]:
            continue
        yield Change(name, *(f"stage {e[name][0]} ({e[name][1]})" if name in e else "-" for e in (before, after)))


def _buckets(one: Plan, two: Plan) -> Iterator[Change]:
    """Counts, and the first bucket that is another."""
    ours, theirs = one.ownership.buckets, two.ownership.buckets
    yield from _fields({"buckets": len(ours)}, {"buckets": len(theirs)})
    for a, b in zip_longest(ours, theirs):
        if a != b:
            yield Change("first that differs", _bucket(a), _bucket(b))
            return


def _bucket(bucket: Bucket | None) -> str:
    if bucket is None:
        return "-"
    size = format_bytes(bucket.nbytes)
    first, part = bucket.slots[0].tensor, format_bytes(bucket.part_nbytes)
    return f"{bucket.name}, stage {bucket.stage}, {len(bucket.slots)} tensors from {first}, {size}, parts of {part}"


def _program(one: Program | None, two: Program | None) -> Iterator[Change]:
    if one is None or two is None:
        yield Change("micro-batches", *(each.position.value if each else "-" for each in (one, two)))
        return
    ours, theirs = (Counter(VERBS[type(x)] for x in program.instructions) for program in (one, two))
    yield from _fields(dict(ours), dict(theirs))
    for index, (a, b) in enumerate(zip_longest(one.instructions, two.instructions)):
        if a != b:
            first, second = (where(p, index) if index < len(p.instructions) else "-" for p in (one, two))
            yield Change("first instruction that differs", first, second)
            return


def _costs(one: Plan, two: Plan) -> Iterator[Change]:
    def facts(plan: Plan) -> dict[str, str]:
        nbytes = {
            "peak": plan.memory.peak_bytes,
            "resident": plan.memory.resident_bytes,
            "sent per rank": plan.traffic.bytes_per_rank,
        }
        return {name: f"{format_bytes(count)} ({count})" for name, count in nbytes.items()}

    yield from _fields(facts(one), facts(two))
