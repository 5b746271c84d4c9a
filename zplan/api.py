"""The functions that people call: plan, compile, annotate, load_plan."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zplan.errors import SpecError
from zplan.graph.lift import dtype_of
from zplan.graph.optimizer import groups_of
from zplan.graph.trace import STAGE, Trace, trace
from zplan.planner import auto, planfile
from zplan.planner.hardware import reserve_nbytes
from zplan.planner.plan import Plan
from zplan.planner.relower import relower
from zplan.planner.spec import Rule, Spec, make_spec
from zplan.planner.stages import AUTO, parse_stage
from zplan.precision import Precision
from zplan.progress import Progress, quiet
from zplan.runtime import agree
from zplan.runtime.comm import Comm
from zplan.runtime.group import make_group
from zplan.runtime.optim import Clipping
from zplan.runtime.state import State
from zplan.runtime.step import TrainStep

LossFn = Callable[[Any, Any], Any]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
Optimizers = OptimizerFactory | Mapping[str, OptimizerFactory]


@dataclass(frozen=True)
class Job:
    """What the command line plans and runs. `batches` is an iterable, or a function `(rank, world) -> iterable`."""

    model: torch.nn.Module
    loss_fn: LossFn
    batches: Iterable[Any] | Callable[[int, int], Iterable[Any]]
    optimizer: Optimizers | None = None


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
    optimizer: Optimizers | None = None,
    stage: int | str = AUTO,
    world_size: int | None = None,
    memory: int | str | None = None,
    device: str | torch.device | None = None,
    rules: Sequence[Rule] = (),
    bucket: int | str = "25MB",
    prefetch: int = 1,
    depth: int = 2,
    micro_batches: int = 1,
    precision: str | Precision | None = None,
    progress: Progress = quiet,
) -> Plan:
    """Traces one micro-batch and plans it for `world_size` ranks; runs nothing, and leaves the model as it is.

    `optimizer` is a factory from named parameters to an optimizer, or a mapping from patterns of their names to
    factories (the first that matches wins, as with `Rule`); without one, AdamW is assumed and the plan says so.
    `stage`: 0 to 3, or "auto", the lowest that fits `memory`, the bytes that one rank may hold at once (None: what the
    CUDA device has, less a reserve for what the allocator does not see; on a CPU there is no budget). `device`: the
    type that will run it, by default where the model lives; for "cuda" without one at hand, operators are those of a
    CPU, and the plan says so. `rules` go before annotations. `bucket` bounds the bytes that travel together, `prefetch`
    is how many buckets ahead gathers are launched, `depth` how many reductions may be in flight, `micro_batches` how
    many batches like this one an optimizer step has. `precision`: "bf16" computes in bf16 and holds and updates fp32
    masters of what is trained; a `Precision` says more; None is as the model's parameters are. `progress` is called
    with the name of each phase as it begins. Raises `SpecError` for options, `TraceError` for models, `BudgetError`.
    """
    traced, spec = _traced(
        model,
        loss_fn,
        batch,
        optimizer,
        device,
        progress,
        stage=stage,
        world_size=_default_world() if world_size is None else world_size,
        memory=memory,
        rules=rules,
        bucket=bucket,
        prefetch=prefetch,
        depth=depth,
        micro_batches=micro_batches,
        precision=precision,
    )
    return auto.decide(traced.graph, spec, progress=progress)


def plans(model: torch.nn.Module, loss_fn: LossFn, batch: Any, **options: Any) -> tuple[Plan, ...]:
    """Takes what `plan` takes but for a stage; returns a plan for each stage, lowest first, whether it fits or not.

    The model is traced once. `zplan.compare` puts them side by side.
    """
    progress: Progress = options.pop("progress", quiet)
    options["stage"] = AUTO
    options["world_size"] = _default_world() if options.get("world_size") is None else options["world_size"]
    optimizer, device = options.pop("optimizer", None), options.pop("device", None)
    traced, spec = _traced(model, loss_fn, batch, optimizer, device, progress, **options)
    return auto.every_stage(traced.graph, spec, progress=progress)


def load_plan(path: str | Path) -> Plan:
    """Reads a file that `plan.save` wrote. Raises `SpecError` for one that is foreign, cut short or changed."""
    return planfile.load(path)


def compile(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    optimizer: Optimizers,
    plan: Plan | str | Path | None = None,
    strict: bool = False,
    group: dist.ProcessGroup | None = None,
    clip: float | None = None,
    skip_nonfinite: bool = False,
    timeout: float | None = None,
    sync: bool = True,
    stage: int | str | None = None,
    memory: int | str | None = None,
    rules: Sequence[Rule] | None = None,
    bucket: int | str | None = None,
    prefetch: int | None = None,
    depth: int | None = None,
    micro_batches: int | None = None,
    precision: str | Precision | None = None,
    progress: Progress = quiet,
) -> TrainStep:
    """Plans for the ranks of `group` and returns the training step; takes the model's parameters over.

    `plan`: one made before, or its file, in place of the options that make one. Its decisions are kept; where this
    graph is another than the planned one (another device, other shapes), they are lowered again, the budget is checked
    again, and a warning says what differs, unless `strict`, which refuses. `group` defaults to the default process
    group; where there is none but the process was started by torchrun, one is made, and `close` gives it up again; else
    the world is one rank. `clip`: gradients are scaled down so that their norm over all parameters is at most this, as
    torch's `clip_grad_norm_` does (`float("inf")` only measures: `step.grad_norm`). `skip_nonfinite`: a step whose
    gradients hold an infinity or a NaN updates nothing, on any rank, and `step.skipped` says so. Parameters and buffers
    become rank 0's unless `sync=False`. `timeout`: seconds after which a rank that waits for others gives up, in a
    group that zplan makes; None: ten minutes. Raises on every rank, with the same words, when ranks fail or their plans
    differ.
    """
    asked: dict[str, Any] = {"stage": stage, "memory": memory, "rules": rules, "bucket": bucket, "prefetch": prefetch}
    asked |= {"depth": depth, "micro_batches": micro_batches, "precision": precision}
    asked = {name: value for name, value in asked.items() if value is not None}
    comm, owns_group = _comm(group, model, timeout)
    clipping = Clipping(clip, skip_nonfinite)

    def make() -> tuple[Trace, Plan, torch.optim.Optimizer]:
        _has_weights(model)
        if clip is not None and not clip > 0:
            raise SpecError(f"clip {clip!r} is no norm: give a number above zero")
        if timeout is not None and not timeout > 0:
            raise SpecError(f"timeout {timeout!r} is no time: give seconds above zero")
        if plan is not None and asked:
            raise SpecError(f"{', '.join(asked)}: a plan says that already; leave either out")
        if plan is not None and not isinstance(plan, (Plan, str, Path)):
            raise SpecError(f"plan is a {type(plan).__name__}: give a Plan, or the file of one")
        given = plan if plan is None or isinstance(plan, Plan) else load_plan(plan)
        if given is None:
            options = {"stage": AUTO, **asked, "world_size": comm.world}
            traced, spec = _traced(model, loss_fn, batch, optimizer, None, progress, **options)
            made = auto.decide(traced.graph, spec, progress=progress)
        else:
            precise = given.spec.precision
            traced = trace(model, loss_fn, batch, optimizer=optimizer, precision=precise, progress=progress)
            made = _again(given, traced, comm, strict)
        held = {tensor.name: dtype_of(tensor.held) for tensor in made.graph.tensors}
        return traced, made, groups_of(optimizer, model, held=held)[0]

    try:
        traced, planned, stepper = agree.attempt(comm, make, lambda made: agree.of_plan(made[1], clipping))
    except BaseException:
        if owns_group:
            dist.destroy_process_group()
        raise
    state = State(model, planned.ownership, comm, sync=sync)
    return TrainStep(planned, traced, state, stepper, comm, loss_fn=loss_fn, clipping=clipping, owns_group=owns_group)


def _again(given: Plan, traced: Trace, comm: Comm, strict: bool) -> Plan:
    """The given plan on this graph; warns on the first rank, or refuses, where it had to be lowered again."""
    made, difference = relower(given, traced.graph, world=comm.world)
    if difference:
        words = f"the plan was made for another graph of this model\n{difference}"
        if strict:
            raise SpecError(f"{words}\nstrict=True refuses that: plan this graph, or leave strict out")
        if comm.rank == 0:
            warnings.warn(f"{words}\nits decisions were kept and lowered again", stacklevel=5)
    return auto.accept(made)


def _traced(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: Optimizers | None,
    device: str | torch.device | None,
    progress: Progress,
    **options: Any,
) -> tuple[Trace, Spec]:
    runs_on = _device(model) if device is None else torch.device(device)
    options["rules"] = tuple(options.get("rules", ()))
    spec = make_spec(**options, device=runs_on.type)
    place = None if device is None else runs_on
    note: tuple[str, ...] = ()
    if runs_on.type == "cuda" and not torch.cuda.is_available():
        place = torch.device("cpu")
        note = (
            "traced on a CPU for CUDA: operators are those of a CPU, and a GPU's may keep more or less; the peak is an "
            "estimate",
        )
    traced = trace(
        model,
        loss_fn,
        batch,
        optimizer=optimizer,
        device=place,
        runs_on=runs_on.type,
        precision=spec.precision,
        progress=progress,
    )
    if note:
        traced = replace(traced, graph=replace(traced.graph, notes=(*traced.graph.notes, *note)))
    if spec.memory is None and runs_on.type == "cuda" and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(runs_on).total_memory
        spec = spec.model_copy(update={"memory": total - reserve_nbytes()})
    return traced, spec


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


def _comm(group: dist.ProcessGroup | None, model: torch.nn.Module, timeout: float | None) -> tuple[Comm, bool]:
    """The group to use, and whether it was made here."""
    if timeout is not None and (group is not None or dist.is_initialized()):
        raise SpecError(
            "timeout= is of a group that zplan makes, and this one is yours: init_process_group(timeout=...)"
        )
    if group is not None:
        return Comm(group), False
    if dist.is_initialized():
        return Comm(dist.group.WORLD), False
    if dist.is_torchelastic_launched():
        make_group(_device(model).type, timeout=timeout)
        return Comm(dist.group.WORLD), True
    return Comm(None), False
