"""The functions that people call: plan, compile, annotate."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zplan.errors import SpecError
from zplan.graph.optimizer import groups_of
from zplan.graph.trace import STAGE, Trace, trace
from zplan.planner.plan import Plan, make_plan
from zplan.planner.spec import Spec, make_spec
from zplan.planner.stages import parse_stage
from zplan.runtime import agree
from zplan.runtime.comm import Comm
from zplan.runtime.state import State
from zplan.runtime.step import TrainStep

LossFn = Callable[[Any, Any], Any]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Job:
    """What the command line plans and runs. `batches` is an iterable, or a function `(rank, world) -> iterable`."""

    model: torch.nn.Module
    loss_fn: LossFn
    batches: Iterable[Any] | Callable[[int, int], Iterable[Any]]
    optimizer: OptimizerFactory | None = None


def annotate(module: torch.nn.Module, *, stage: int) -> torch.nn.Module:
    """Gives every parameter in `module` a stage of its own; an annotation further inside goes before. Returns it.

    >>> layer = annotate(torch.nn.Linear(2, 2), stage=1)
    """
    if not isinstance(module, torch.nn.Module):
        raise SpecError(f"annotate takes a module, not a {type(module).__name__}")
    setattr(module, STAGE, parse_stage(stage))
    return module


def plan(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    optimizer: OptimizerFactory | None = None,
    stage: int | str,
    world_size: int | None = None,
    bucket: int | str = "25MB",
    prefetch: int = 1,
    depth: int = 2,
) -> Plan:
    """Traces one micro-batch and plans it for `world_size` ranks; runs nothing, and leaves the model as it is.

    `optimizer` is a factory from named parameters to an optimizer; without one, AdamW is assumed and the plan says so.
    `bucket` bounds the bytes that travel together, `prefetch` is how many buckets ahead gathers are launched, `depth`
    how many reductions may be in flight. Raises `SpecError` for options, `TraceError` for models.
    """
    world = world_size if world_size is not None else _default_world()
    spec = _spec(stage=stage, world_size=world, bucket=bucket, prefetch=prefetch, depth=depth, model=model)
    return _planned(model, loss_fn, batch, optimizer, spec)[1]


def compile(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    optimizer: OptimizerFactory,
    group: dist.ProcessGroup | None = None,
    sync: bool = True,
    stage: int | str,
    bucket: int | str = "25MB",
    prefetch: int = 1,
    depth: int = 2,
) -> TrainStep:
    """Plans for the ranks of `group` and returns the training step; takes the model's parameters over.

    `group` defaults to the default process group; where there is none but the process was started by torchrun, one is
    made, and `close` gives it up again; else the world is one rank. Parameters and buffers become rank 0's unless
    `sync=False`. Raises on every rank, with the same words, when ranks fail or their plans differ.
    """
    comm, owns_group = _comm(group, model)

    def make() -> tuple[Trace, Plan, torch.optim.Optimizer]:
        _has_weights(model)
        spec = _spec(stage=stage, world_size=comm.world, bucket=bucket, prefetch=prefetch, depth=depth, model=model)
        traced, planned = _planned(model, loss_fn, batch, optimizer, spec)
        return traced, planned, groups_of(optimizer, model)[0]

    try:
        traced, planned, stepper = agree.attempt(comm, make, lambda made: agree.of_plan(made[1]))
    except BaseException:
        if owns_group:
            dist.destroy_process_group()
        raise
    state = State(model, planned.ownership, comm, sync=sync)
    return TrainStep(planned, traced, state, stepper, comm, owns_group=owns_group)


def _planned(
    model: torch.nn.Module, loss_fn: LossFn, batch: Any, optimizer: OptimizerFactory | None, spec: Spec
) -> tuple[Trace, Plan]:
    traced = trace(model, loss_fn, batch, optimizer=optimizer)
    return traced, make_plan(traced.graph, spec)


def _spec(*, model: torch.nn.Module, prefetch: int, depth: int, **options: Any) -> Spec:
    return make_spec(prefetch=prefetch, depth=depth, native_all_reduce=_device(model).type != "cpu", **options)


def _device(model: torch.nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device


def _has_weights(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise SpecError(
                f"{name} is on meta, and compile needs real weights: materialise the model first, or build it anew if "
                "it was compiled before"
            )


def _default_world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _comm(group: dist.ProcessGroup | None, model: torch.nn.Module) -> tuple[Comm, bool]:
    """The group to use, and whether it was made here."""
    if group is not None:
        return Comm(group), False
    if dist.is_initialized():
        return Comm(dist.group.WORLD), False
    if dist.is_torchelastic_launched():
        device = _device(model)
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
        return Comm(dist.group.WORLD), True
    return Comm(None), False
