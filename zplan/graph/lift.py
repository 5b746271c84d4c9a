"""Lift: the nodes of a cleaned graph, read off as the planner's torch-free values and ops."""

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zplan.graph import compat
from zplan.graph.clean import getitems, kind_of
from zplan.graph.draft import Draft, storages, tensors
from zplan.graph.ir import Op, OpKind, Value

_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}

# Measured on torch 2.13, CPU: with a mean or a sum these compute element by element into what becomes the scalar, so
# the scalar keeps the memory of all elements. Fake tensors do not show it.
_SCALARS_THAT_KEEP_ALL = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)


@dataclass
class Lifted:
    """`name`: node -> value; `constants`: value -> the node that reads the attribute."""

    name: dict[fx.Node, str] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    constants: dict[str, fx.Node] = field(default_factory=dict)
    op_nodes: dict[str, tuple[fx.Node, ...]] = field(default_factory=dict)
    ops: tuple[Op, ...] = ()


def dtype_name(dtype: torch.dtype) -> str:
    """The short name that plans print."""
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """What `dtype_name` gives this name."""
    return next((dtype for dtype, short in _DTYPES.items() if short == name), None) or getattr(torch, name)


def lift(draft: Draft) -> Lifted:
    return _Lift(draft).lifted


class _Lift:
    """Walks the graph once. Names of values: the user's own for inputs, the node's for all others."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.lifted = Lifted()
        self._owner: dict[int, str] = {}
        self._taken: set[str] = set()
        for name, node in draft.inputs.items():
            self._value(node, self._free_name(name))
        ops = []
        for node in draft.graph.nodes:
            if node.op == "get_attr":
                name = self._value(node, self._free_name(f"constant.{len(self.lifted.constants)}"))
                self.lifted.constants[name] = node
            elif node.op == "call_function" and node.target is not operator.getitem:
                ops.append(self._op(node))
        self.lifted.ops = tuple(ops)

    def _free_name(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def _value(self, node: fx.Node, name: str) -> str:
        tensor: torch.Tensor = node.meta["val"]
        owner = self._owner.setdefault(compat.storage_key(tensor), name)
        if owner == name:
            self.lifted.storages[name] = tensor.untyped_storage().nbytes()
        self.lifted.name[node] = name
        self.lifted.values[name] = Value(name, tuple(tensor.shape), dtype_name(tensor.dtype), owner)
        return name

    def _op(self, node: fx.Node) -> Op:
        place = self.draft.places[node]
        kind = self.draft.kinds.get(node) or kind_of(node)
        writes = kind is OpKind.WRITE
        inputs = tuple(self.lifted.name[source] for source in node.all_input_nodes)
        single = isinstance(node.meta.get("val"), torch.Tensor)
        parts = [] if single else getitems(node)
        whole = [node] if single and node.users else []
        outputs = tuple(self._value(part, self._free_name(part.name)) for part in whole or parts)
        name = outputs[0] if whole else self._free_name(node.name)
        if whole and str(node.target) in _SCALARS_THAT_KEEP_ALL:
            shapes = [tensors(source)[0].shape for source in node.all_input_nodes]
            itemsize = node.meta["val"].itemsize
            self.lifted.storages[name] = itemsize * max(map(math.prod, shapes))
        self.lifted.op_nodes[name] = (node, *parts)
        return Op(
            name=name,
            target=str(node.target),
            inputs=tuple(reversed(inputs)) if writes else inputs,
            outputs=outputs,
            phase=place.phase,
            module=place.module,
            kind=kind,
            workspace=self._workspace(node, whole or parts),
            line=place.line,
            literals=_literals(node, inputs, self.lifted.name),
        )

    def _workspace(self, node: fx.Node, read: list[fx.Node]) -> int:
        """Bytes of the results that nobody reads, in memory that nothing else lives in."""
        kept = {key for part in (*read, *node.all_input_nodes) for key in storages(part)}
        lost = {compat.storage_key(x): x.untyped_storage().nbytes() for x in tensors(node)}
        return sum(nbytes for key, nbytes in lost.items() if key not in kept)


def _literals(node: fx.Node, inputs: tuple[str, ...], name: Mapping[fx.Node, str]) -> str:
    """The arguments, values as %i of the op's inputs; "" where they are just these, in order."""
    index = {value: f"%{i}" for i, value in enumerate(inputs)}
    words = list(_words(node.args, index, name))
    words += [f"{key}={_word(value, index, name)}" for key, value in node.kwargs.items()]
    return "" if words == list(index.values()) else ", ".join(words)


def _words(items: Any, index: Mapping[str, str], name: Mapping[fx.Node, str]) -> Iterator[str]:
    for item in items:
        yield _word(item, index, name)


def _word(item: Any, index: Mapping[str, str], name: Mapping[fx.Node, str]) -> str:
    if isinstance(item, fx.Node):
        return index[name[item]]
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(_words(item, index, name))}]"
    return dtype_name(item) if isinstance(item, torch.dtype) else str(item)
