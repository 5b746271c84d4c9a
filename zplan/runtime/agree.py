"""Agree: before anything is launched, all ranks show each other what they hold, or what went wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from zplan.errors import AgreementError
from zplan.planner.plan import Plan
from zplan.planner.program import LAUNCHES
from zplan.runtime.comm import Comm
from zplan.runtime.optim import NO_CLIPPING, Clipping

T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """What one rank shows: an error, or the hashes of its plan."""

    error: str = ""
    kind: str = ""
    plan: str = ""
    spec: str = ""
    lines: tuple[str, ...] = ()


def attempt(comm: Comm, make: Callable[[], T], report: Callable[[T], Report]) -> T:
    """Runs `make` on every rank; returns what it made when all ranks made the same, else raises on all of them.

    Where every rank fails with the same words, each raises its own error; otherwise an `AgreementError` that says what
    each rank has. Communicates: one small object per rank, twice when plans differ.
    """
    failure: Exception | None = None
    made: T | None = None
    try:
        made = make()
        mine = report(made)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
        mine = Report(error=str(error) or repr(error), kind=type(error).__name__)
    reports = comm.exchange(Report(mine.error, mine.kind, mine.plan, mine.spec))
    if failure is not None and all((r.kind, r.error) == (mine.kind, mine.error) for r in reports):
        raise failure
    failed = [(rank, r) for rank, r in enumerate(reports) if r.error]
    if failed:
        lines = [f"rank {rank}: {r.kind}: {r.error}" for rank, r in failed]
        good = len(reports) - len(failed)
        words = f"{len(failed)} of {len(reports)} ranks failed, {good} did not\n" + "\n".join(lines)
        raise AgreementError(words) from failure
    if len({r.plan for r in reports}) > 1:
        raise AgreementError(_differ(comm.exchange(mine)))
    assert made is not None
    return made


def of_plan(plan: Plan, clipping: Clipping = NO_CLIPPING) -> Report:
    """What ranks must have alike, and the lines that tell two plans apart."""
    graph = plan.graph
    lines = [f"parameter {t.name}: {t.dtype}{list(t.shape)}, trained: {t.grad is not None}" for t in graph.tensors]
    lines += [f"optimizer {graph.optimizer.name}, group {g.index}: {g.options}" for g in graph.optimizer.groups]
    lines += [f"batch {name}: {graph.values[name].dtype}{list(graph.values[name].shape)}" for name in graph.batch]
    lines += [f"op {op.name}: {op.target}({op.literals})" for op in graph.ops]
    lines += [
        f"bucket {b.name}: stage {b.stage}, {len(b.slots)} tensors, part {b.part}" for b in plan.ownership.buckets
    ]
    launches = (x for program in plan.programs for x in program.instructions if isinstance(x, LAUNCHES))
    lines += [f"collective {x!r}" for x in launches]
    asked = f"{plan.spec!r}, {clipping}" if clipping else repr(plan.spec)
    return Report(plan=f"{plan.agreement} {clipping}" if clipping else plan.agreement, spec=asked, lines=tuple(lines))


def _differ(reports: list[Report]) -> str:
    first = reports[0]
    lines = ["the ranks hold different plans"]
    lines += [f"rank {rank}: plan {report.plan}" for rank, report in enumerate(reports)]
    other = next(rank for rank, report in enumerate(reports) if report.plan != first.plan)
    theirs = reports[other]
    if theirs.spec != first.spec:
        lines.append(f"asked for on rank 0: {first.spec}; on rank {other}: {theirs.spec}")
    for mine, yours in zip((*first.lines, "nothing more"), (*theirs.lines, "nothing more"), strict=False):
        if mine != yours:
            lines.append(f"first difference: rank 0 has {mine}; rank {other} has {yours}")
            break
    lines.append("try: the same model, batch shapes, options and torch on every rank")
    lines.append("a model that takes the order of its layers from a set needs the same PYTHONHASHSEED on every rank")
    return "\n".join(lines)
