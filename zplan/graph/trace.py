"""Trace: a model, its loss and its optimizer become one graph of ATen ops, forward and backward.

`Graph` is all the planner sees; the fx graph beside it is what the runtime copies nodes from. Values link the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from zplan.errors import TraceError
from zplan.graph import refuse
from zplan.graph.capture import Capture, Leaves, LossFn, capture, names_of
from zplan.graph.clean import clean
from zplan.graph.draft import Draft, constant_names, refuse_mixed, refuse_mutation
from zplan.graph.dtypes import Dtypes, casts, dtypes_of
from zplan.graph.ir import Graph, Optimizer, Tensor
from zplan.graph.lift import Lifted, dtype_name, lift
from zplan.graph.optimizer import Factories, groups_of, measure
from zplan.precision import Precision
from zplan.progress import Progress, quiet

# The attribute that `zplan.annotate` leaves on a module.
STAGE = "_zplan_stage"
# Names that a note writes out.
NAMED = 6


@dataclass(frozen=True)
class Trace:
    """A graph and what runs it.

    `module` takes parameters, buffers, batch tensors (as `graph` names them, in that order) and returns
    (loss, *aux, *gradients), gradients in the order of the tensors that have one; it writes buffers in place.
    `node`: value -> the node that holds it. `op_nodes`: op -> its call and the getitems that unpack it.
    `constants`: tensors that were closed over, by value; in `module` they are attributes.
    `batch_names`, `batch_leaves`: all leaves of the batch; a tensor is there as a meta tensor, another leaf as it was.
    `output`: what loss_fn returned. `loss_scale`: the one of `constants` that gradients come multiplied by, if any.
    """

    graph: Graph
    module: fx.GraphModule
    node: Mapping[str, fx.Node]
    op_nodes: Mapping[str, tuple[fx.Node, ...]]
    constants: Mapping[str, torch.Tensor]
    batch_spec: Any
    batch_names: tuple[str, ...]
    batch_leaves: tuple[Any, ...]
    output: Leaves
    loss_scale: torch.Tensor | None = None

    @property
    def output_spec(self) -> Any:
        return self.output.spec

    def unflatten(self, outputs: Sequence[torch.Tensor]) -> Any:
        """What loss_fn returned, with these tensors (in the order of `graph.outputs`) in their places."""
        return self.output.rebuild(outputs)


def trace(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    optimizer: Factories | None = None,
    device: torch.device | str | None = None,
    runs_on: str | None = None,
    evaluate: bool = False,
    precision: Precision | None = None,
    progress: Progress = quiet,
) -> Trace:
    """Runs `loss_fn(model, batch)` and its backward once without memory or values; the model is left as it was.

    `device`: where everything is to live; None: where it is, and the CPU for what is on meta. `runs_on`: the type of
    device whose optimizer step is measured; None: the traced one. `evaluate`: the loss alone, without gradients, in
    evaluation mode; no optimizer is asked. `precision`: parameters take part in its dtypes.
    """
    if not callable(loss_fn):
        raise TraceError(f"loss_fn is a {type(loss_fn).__name__}, not a function of (model, batch)")
    refuse.model(model)
    leaves = Leaves.of(batch, "batch")
    refuse.leaves(leaves.fixed, leaves.paths, "the batch holds")
    for name, leaf in leaves.tensors.items():
        refuse.plain(name, leaf)
    groups = {} if evaluate else groups_of(optimizer, model)[1]
    if not groups and not evaluate:
        raise TraceError("no parameter to train: none has requires_grad=True and is in an optimizer group")
    place = None if device is None else torch.device(device)
    wanted = [name for name, _ in model.named_parameters() if name in groups]
    dtypes = dtypes_of(model, precision, groups)
    loss_scale = _loss_scale(model, place) if precision is not None and precision.scales and not evaluate else None
    captured = capture(
        model,
        loss_fn,
        leaves,
        wanted=wanted,
        device=place,
        evaluate=evaluate,
        dtypes={name: each.compute for name, each in dtypes.items()},
        casts=lambda: casts(model, precision),
        loss_scale=loss_scale,
        progress=progress,
    )
    progress("clean", 0)
    draft = Draft.of(captured)
    names = constant_names(draft, captured, model, loss_fn)
    names |= {node: "" for node in names if getattr(captured.module, str(node.target)) is loss_scale}
    refuse_mutation(draft, names)
    refuse_mixed(draft)
    clean(draft)
    captured.module.recompile()
    captured.module.graph.lint()
    progress("lift", 0)
    lifted = lift(draft)
    progress("optimizer", 0)
    graph = Graph(
        tensors=tensors_of(model, draft, lifted, groups, dtypes),
        values=lifted.values,
        storages=lifted.storages,
        ops=lifted.ops,
        outputs=tuple(lifted.name[node] for node in draft.outputs),
        buffers=tuple(captured.buffers),
        batch=tuple(leaves.tensors),
        constants=tuple(lifted.constants),
        optimizer=Optimizer("none", ())
        if evaluate
        else measure(optimizer, model, device=runs_on or captured.device.type, held=_held(dtypes)),
        device=captured.device.type,
        stages=stages_of(model),
        regions=captured.checkpointed,
        notes=notes(model, draft, captured, groups, {value: names[node] for value, node in lifted.constants.items()}),
    )
    return Trace(
        graph=graph,
        module=captured.module,
        node={name: node for node, name in lifted.name.items()},
        op_nodes=lifted.op_nodes,
        constants={value: getattr(captured.module, str(node.target)) for value, node in lifted.constants.items()},
        batch_spec=leaves.spec,
        batch_names=leaves.paths,
        batch_leaves=leaves.fill([torch.empty_like(leaf, device="meta") for leaf in leaves.tensors.values()]),
        output=captured.outputs,
        loss_scale=loss_scale,
    )


def _loss_scale(model: nn.Module, place: torch.device | None) -> torch.Tensor:
    device = place or next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    return torch.ones((), device=device)


def _held(dtypes: Mapping[str, Dtypes]) -> dict[str, torch.dtype]:
    return {name: each.held for name, each in dtypes.items()}


def tensors_of(
    model: nn.Module, draft: Draft, lifted: Lifted, groups: Mapping[str, int], dtypes: Mapping[str, Dtypes]
) -> tuple[Tensor, ...]:
    parameters = dict(model.named_parameters())
    found = []
    for name, aliases in names_of(model.named_parameters(remove_duplicate=False)).items():
        parameter = parameters[name]
        grad = draft.gradients.get(name)
        compute, held = dtypes[name].compute, dtypes[name].held
        found.append(
            Tensor(
                name=name,
                aliases=aliases,
                shape=tuple(parameter.shape),
                dtype=dtype_name(compute),
                module=name.rpartition(".")[0],
                trainable=parameter.requires_grad,
                grad=None if grad is None else lifted.name[grad],
                group=groups.get(name),
                master="" if held == compute else dtype_name(held),
            )
        )
    return tuple(found)


def stages_of(model: nn.Module) -> dict[str, int]:
    """What `annotate` left: module name -> stage."""
    return {name: vars(module)[STAGE] for name, module in model.named_modules() if STAGE in vars(module)}


def notes(
    model: nn.Module, draft: Draft, captured: Capture, groups: Mapping[str, int], constants: Mapping[str, str]
) -> tuple[str, ...]:
    """What a user should know and would not see elsewhere."""
    lines = [f"{name} gets no gradient" for name in captured.wanted if name not in draft.gradients]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in groups:
            lines.append(f"{name} is in no optimizer group: it gets no gradient and never changes")
        if not parameter.is_contiguous():
            lines.append(f"{name} is traced contiguous, which it is not")
    lines += [
        f"{value} is {origin}, closed over: it stays as it is now" for value, origin in constants.items() if origin
    ]
    if draft.written:
        written = _listed(list(draft.written))
        lines.append(f"each rank writes buffers of its own, and full_state_dict() gives rank 0's: {written}")
    lines += [f"the step writes into {name}; the write stays inside the step" for name in draft.batch_written]
    lines += captured.changes.notes
    if captured.checkpointed:
        regions = _listed([name or "the loss" for name in captured.checkpointed])
        lines.append(
            f"torch.utils.checkpoint is called straight through, the plan decides what is recomputed: {regions}"
        )
    return tuple(lines)


def _listed(names: Sequence[str]) -> str:
    """A few names as they are, many by the first and the last."""
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{names[0]}, ..., {names[-1]} ({len(names)} in all)"
