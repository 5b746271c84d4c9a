"""Draft: a captured graph while it is worked on, and questions about its nodes."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from zplan.errors import TraceError
from zplan.graph import compat, refuse
from zplan.graph.capture import Capture, Place
from zplan.graph.ir import OpKind, Phase

aten = torch.ops.aten


@dataclass
class Draft:
    """A graph under work.

    `parameters`, `buffers`, `batch`: name -> placeholder. `outputs`: loss, then aux. `gradients`: by parameter.
    `written`: buffer -> its new value. `kinds`: of nodes whose kind does not show.
    """

    graph: fx.Graph
    places: dict[fx.Node, Place]
    parameters: dict[str, fx.Node]
    buffers: dict[str, fx.Node]
    batch: dict[str, fx.Node]
    outputs: list[fx.Node]
    gradients: dict[str, fx.Node]
    written: dict[str, fx.Node]
    batch_written: tuple[str, ...]
    kinds: dict[fx.Node, OpKind] = field(default_factory=dict)

    @classmethod
    def of(cls, captured: Capture) -> "Draft":
        """Takes the capture's graph over. Refuses writes into parameters, and buffers that change their shape."""
        graph = captured.module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        names = [*captured.parameters, *captured.buffers, *captured.batch.tensors]
        inputs = dict(zip(names, placeholders, strict=True))
        returned: Any = next(iter(reversed(graph.nodes))).args[0]
        taken = iter(returned)
        outputs = [next(taken) for _ in captured.outputs.tensors]
        gradients = {name: next(taken) for name in captured.wanted}
        after = {name: next(taken) for name in (*captured.buffers, *captured.parameters, *captured.batch.tensors)}
        changed = [name for name, node in after.items() if not same_tensor(node, inputs[name])]
        for name in changed:
            _refuse_change(name, inputs[name], after[name], parameter=name in captured.parameters)
            twins = [other for other, key in captured.memory.items() if key == captured.memory[name] and other != name]
            if twins:
                raise TraceError(
                    f"the step writes into {name}, which shares its memory with {twins[0]}: "
                    "the write would not be seen there\n"
                    f"try: {name} = {name}.clone() before the step"
                )
        for name, node in gradients.items():
            refuse.gradient(name, None if node is None else node.meta.get("val"))
        if captured.wanted and all(node is None for node in gradients.values()):
            raise TraceError("the loss reaches no parameter of any optimizer group: nothing to train")
        return cls(
            graph=graph,
            places=captured.places,
            parameters={name: inputs[name] for name in captured.parameters},
            buffers={name: inputs[name] for name in captured.buffers},
            batch={name: inputs[name] for name in captured.batch.tensors},
            outputs=outputs,
            gradients={name: node for name, node in gradients.items() if node is not None},
            written={name: after[name] for name in captured.buffers if name in changed},
            batch_written=tuple(name for name in captured.batch.tensors if name in changed),
        )

    @property
    def inputs(self) -> dict[str, fx.Node]:
        return {**self.parameters, **self.buffers, **self.batch}

    def become(self, became: Mapping[fx.Node, fx.Node]) -> None:
        """What is handed out follows nodes that were replaced."""
        self.outputs = [became.get(node, node) for node in self.outputs]
        self.gradients = {name: became.get(node, node) for name, node in self.gradients.items()}
        self.written = {name: became.get(node, node) for name, node in self.written.items()}

    def copy(self, node: fx.Node, after: fx.Node, phase: Phase, kind: OpKind) -> fx.Node:
        """A clone of `node`, made right after `after`."""
        with self.graph.inserting_after(call_end(after)):
            clone = self.graph.call_function(aten.clone.default, (node,))
        clone.meta["val"] = torch.empty_like(node.meta["val"])
        place = self.places.get(after) or self.places.get(node)
        self.places[clone] = Place(phase, place.module if place else "", place.line if place else "")
        self.kinds[clone] = kind
        return clone


def storages(node: fx.Node) -> frozenset[int]:
    """Keys of the memory that a node's result lives in."""
    return frozenset(compat.storage_key(tensor) for tensor in tensors(node))


def tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [value for value in values if isinstance(value, torch.Tensor)]


def call_end(node: fx.Node) -> fx.Node:
    """The last of the nodes that belong to the same call."""
    call = node.args[0] if node.target is operator.getitem else node
    while node.next.target is operator.getitem and node.next.args[0] is call:
        node = node.next
    return node


def same_tensor(node: fx.Node, other: fx.Node) -> bool:
    """Whether both are the very same elements of the same memory, seen in the same way."""
    a, b = node.meta.get("val"), other.meta.get("val")
    return node is other or (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and compat.storage_key(a) == compat.storage_key(b)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def constant_names(
    draft: Draft, captured: Capture, model: nn.Module, loss_fn: Callable[..., Any]
) -> dict[fx.Node, str]:
    """Where the user holds each tensor that was closed over; "" for one in the code itself, `torch.tensor(3.0)`."""
    nodes = [node for node in draft.graph.nodes if node.op == "get_attr"]
    if not nodes:
        return {}
    known = {**refuse.closed_over(loss_fn), **refuse.attributes(model)}
    names: dict[fx.Node, str] = {}
    for node in nodes:
        tensor: torch.Tensor = getattr(captured.module, str(node.target))
        if id(tensor) in captured.changes.replaced:
            raise TraceError(
                f"the forward reads {captured.changes.replaced[id(tensor)]} and replaces it, but it is no buffer: "
                "every step would read the same old one\ntry: register_buffer"
            )
        written_out = all(user.target is aten.lift_fresh_copy.default for user in node.users)
        names[node] = "" if written_out else known.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")
    return names


def refuse_mutation(draft: Draft, names: Mapping[fx.Node, str]) -> None:
    """Refuses what functionalization leaves: a write into a tensor it does not know, an operator with a body."""
    for node in draft.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        line = draft.places[node].line if node in draft.places else ""
        if not compat.is_op(node.target):
            raise TraceError(f"{node.target} holds a graph of its own, which a plan cannot see into\n--> {line}")
        if compat.is_mutable(node.target):
            into = next((names[source] for source in node.all_input_nodes if source in names), "a tensor")
            raise TraceError(
                f"the step writes into {into}, which is neither a parameter nor a buffer\n--> {line}: {node.target}\n"
                "try: register_buffer, so that it is saved and every step sees it"
            )


# What refuses operands of several dtypes when it runs, but not when it is traced without values.
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution)


def refuse_mixed(draft: Draft) -> None:
    """Refuses products of two dtypes."""
    for node in draft.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "overloadpacket", None) in _PRODUCTS:
            dtypes = list(dict.fromkeys(tensors(source)[0].dtype for source in node.all_input_nodes))
            if len(dtypes) > 1:
                line = draft.places[node].line if node in draft.places else ""
                raise TraceError(
                    f"{node.target} is given {' and '.join(map(str, dtypes))}\n--> {line}\ntry: cast one of them, as "
                    "x.to(self.weight.dtype); under precision= parameters are cast, buffers keep their dtype"
                )


def _refuse_change(name: str, before: fx.Node, after: fx.Node, *, parameter: bool) -> None:
    if parameter:
        raise TraceError(
            f"the forward writes into parameter {name}, which only the optimizer may\n"
            "try: a buffer, or do it to the weights between steps (step.whole_parameters)"
        )
    old, new = before.meta["val"], after.meta["val"]
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise TraceError(
            f"the forward makes {name} {new.dtype}{list(new.shape)} where it was {old.dtype}{list(old.shape)}\n"
            "try: a buffer that keeps its shape and dtype"
        )
