"""Relower: a plan's decisions on another graph of the same model."""

from dataclasses import replace

from zplan.errors import SpecError
from zplan.graph.ir import Graph
from zplan.planner.buckets import Bucket, make_buckets
from zplan.planner.diff import Diff, unlike
from zplan.planner.ownership import Ownership
from zplan.planner.plan import Plan, programs_of

NAMED = 4


def relower(plan: Plan, graph: Graph, *, world: int) -> tuple[Plan, Diff | None]:
    """The plan for `graph`, and what differs from the given one; None where it is the planned graph itself.

    Stages and buckets stay, bound as they are to names, shapes and dtypes; only where other tensors train, or in other
    optimizer groups, buckets are laid out anew. Raises `SpecError` for another model or another number of ranks.
    """
    differs = unlike(plan.graph, graph)
    if differs:
        lines = [f"  {change.what}: {change.before} in the plan, {change.after} here" for change in differs[:NAMED]]
        more = [f"  and {len(differs) - NAMED} more"] if len(differs) > NAMED else []
        raise SpecError("\n".join([f"plan {plan.hash} is of another model", *lines, *more]))
    if plan.spec.world_size != world:
        raise SpecError(
            f"plan {plan.hash} is for {plan.spec.world_size} ranks, and there are {world}: plan again for {world}"
        )
    spec = plan.spec.model_copy(update={"device": graph.device})
    if graph.hash == plan.graph.hash and spec == plan.spec:
        # The planned programs, on this trace's own lines and modules.
        return replace(plan, graph=graph, programs=tuple(replace(each, graph=graph) for each in plan.programs)), None
    buckets = plan.ownership.buckets
    if not _holds(buckets, graph):
        buckets = make_buckets(graph, plan.choices, world=world, bucket_nbytes=spec.bucket, reduce=spec.reduce)
    ownership = Ownership(buckets, world)
    programs = programs_of(graph, ownership, spec)
    made = replace(plan, graph=graph, spec=spec, ownership=ownership, programs=programs, certificates=())
    return made, plan.diff(made)


def _holds(buckets: tuple[Bucket, ...], graph: Graph) -> bool:
    """Whether each tensor trains, or not, in the group that its bucket was laid out for."""
    return all(
        (slot.group, bucket.trains) == (graph.tensor[slot.tensor].group, graph.tensor[slot.tensor].grad is not None)
        for bucket in buckets
        for slot in bucket.slots
    )
