"""Auto: the lowest stage whose simulated peak fits the memory budget, and the proof for those that do not.

All four stages are planned and simulated, always: a higher stage can have a higher peak, so nothing is bisected.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from zplan.errors import BudgetError
from zplan.graph.ir import Graph
from zplan.planner.certificate import Certificate, lowest
from zplan.planner.memory import Category
from zplan.planner.plan import Plan, make_plan
from zplan.planner.spec import Spec
from zplan.planner.stages import AUTO, STAGES
from zplan.progress import Progress, quiet
from zplan.units import format_bytes

# What is tried, one change at a time, when nothing fits: bucket sizes in bytes, and times the world.
SMALLER_BUCKETS = (8_000_000, 2_000_000)
MORE_RANKS = (2, 4, 8, 16, 32)


def decide(graph: Graph, spec: Spec, *, progress: Progress = quiet) -> Plan:
    """The plan of the spec's stage, or of the lowest that fits. Raises `BudgetError` where the budget is too small."""
    if spec.stage != AUTO:
        progress(f"stage {spec.stage}", 0)
        plan = make_plan(graph, spec)
        return accept(plan, progress=progress)
    plans = every_stage(graph, spec, progress=progress)
    certificates = tuple(plan.certificate for plan in plans)
    found = lowest(certificates)
    if found is None:
        raise _no_stage(graph, spec, certificates, progress)
    return replace(next(plan for plan in plans if plan.stage == found.stage), certificates=certificates)


def every_stage(graph: Graph, spec: Spec, *, progress: Progress = quiet) -> tuple[Plan, ...]:
    """A plan for each stage, lowest first, whatever the budget is."""
    plans = []
    for stage in STAGES:
        progress(f"stage {stage}", 0)
        plan = make_plan(graph, spec, stage=stage)
        plan.certificate  # noqa: B018 (the simulation belongs to this phase)
        plans.append(plan)
    return tuple(plans)


def accept(plan: Plan, *, progress: Progress = quiet) -> Plan:
    """Returns the plan, or raises `BudgetError` where it peaks above its budget."""
    certificate = plan.certificate
    if certificate.fits:
        return plan
    words = f"each rank peaks at {format_bytes(certificate.peak_bytes)}"
    raise BudgetError(_explain(words, certificate, list(_helps(plan.graph, plan.spec, certificate, progress))))


def _no_stage(graph: Graph, spec: Spec, certificates: tuple[Certificate, ...], progress: Progress) -> BudgetError:
    least = min(certificates, key=lambda each: (each.peak_bytes, each.stage))
    words = f"no stage fits: at stage {least.stage}, the best, each rank peaks at {format_bytes(least.peak_bytes)}"
    every = [f"stage {each.stage}: peak {format_bytes(each.peak_bytes)}, {each.verdict}" for each in certificates]
    return BudgetError(_explain(words, least, list(_helps(graph, spec, least, progress)), every))


def _explain(words: str, certificate: Certificate, helps: list[str], every: list[str] | None = None) -> str:
    lines = [
        f"{words}, {format_bytes(certificate.over)} over its budget of {format_bytes(certificate.budget or 0)}",
        f"--> {certificate.where}",
        f"alive there: {', '.join(certificate.alive)}",
        *(every or ()),
        f"try: {'; '.join(helps) or 'a smaller model, or several of these together: no change alone would do'}",
    ]
    return "\n".join(lines)


def _helps(graph: Graph, spec: Spec, certificate: Certificate, progress: Progress) -> Iterator[str]:
    """The least change of each kind that makes it fit, each simulated; at the stage that was asked for, or the best."""
    progress("what would help", 0)
    budget = certificate.budget or 0
    free = spec.stage == AUTO
    stages = sorted({certificate.stage, max(STAGES)}) if free else [certificate.stage]

    def fits(what: str, stages: Sequence[int] = stages, **changes: object) -> str:
        """The words for a change that fits, or nothing."""
        for stage in stages:
            peak = make_plan(graph, spec.model_copy(update=changes), stage=stage).memory.peak_bytes
            if peak <= budget:
                at = f"stage {stage} " if free and what != f"stage {stage}" else ""
                return f"{what} ({at}peaks at {format_bytes(peak)})"
        return ""

    if not free:
        higher = [stage for stage in STAGES if stage > certificate.stage]
        yield from _first(fits(f"stage {stage}", [stage]) for stage in higher)
    if spec.world_size > 1:
        if spec.prefetch:
            yield from _first([fits("prefetch 0", prefetch=0)])
        smaller = [nbytes for nbytes in SMALLER_BUCKETS if nbytes < spec.bucket]
        yield from _first(fits(f"buckets of {nbytes // 10**6}MB", bucket=nbytes) for nbytes in smaller)
    if free or certificate.stage > 0:
        worlds = [spec.world_size * times for times in MORE_RANKS]
        yield from _first(fits(f"{world} ranks", world_size=world) for world in worlds)
    if spec.rules:
        yield from _first([fits("no rules", rules=())])
    activations = make_plan(graph, spec, stage=certificate.stage).memory.by_category.get(Category.ACTIVATIONS, 0)
    if activations > certificate.over:
        yield f"a smaller batch: activations take {format_bytes(activations)} at the peak"


def _first(words: Iterable[str]) -> Iterator[str]:
    """The first that is not empty."""
    yield from islice(filter(None, words), 1)
