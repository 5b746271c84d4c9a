"""The planner's view of one traced micro-batch: tensors, values, ops. It imports no torch.

Words used everywhere below:

- *tensor*: a parameter of the user's model, under its own name (`blocks.0.qkv.weight`).
- *value*: one SSA result of the traced graph; it lives in a *storage*, alone or with its views.
- *storage*: memory that is allocated and released as one; named after the value that allocates it.
- *op*: one ATen call that reads values and makes values; a multi-output call is one op.

A parameter's own value carries the parameter's name; so do buffers. Names of other values are those of
fx nodes and never hold a dot.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class OpKind(Enum):
    """What a pass may do with an op.

    VIEW    its outputs share the storage of its first input; free to repeat
    CAST    a copy of one input in another dtype or layout, no arithmetic; may be repeated
    COMPUTE reads and makes values; deterministic
    RANDOM  draws random numbers: never repeated, never reordered among random ops
    WRITE   writes into a buffer of the model: never repeated
    """

    VIEW = "view"
    CAST = "cast"
    COMPUTE = "compute"
    RANDOM = "random"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Value:
    """A result. `storage` names the value that allocates the memory it lives in (itself, or the base of a view)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: str


@dataclass(frozen=True, slots=True)
class Op:
    """One call. `inputs` and `outputs` are value names, without duplicates, in order of appearance.

    `workspace`: bytes that are allocated and gone within the call (outputs that nobody reads).
    `line`: the user's own source line, `model.py:12`, or "" where it is not known.
    `literals`: the arguments that are no values (sizes, scalars, dtypes), printed; part of the graph's hash.
    """

    name: str
    target: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    phase: Phase
    module: str
    kind: OpKind = OpKind.COMPUTE
    workspace: int = 0
    line: str = ""
    literals: str = ""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter of the model; tied ones appear once, with every name in `aliases` (the first is `name`).

    `grad` is the value that holds its gradient, None where it gets none (frozen, unused, in no optimizer group).
    `module` is the module that holds it; `group` the index of its optimizer group. `dtype` is what it computes in;
    `master` the dtype in which it is held and updated between steps, "" where that is the same.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    module: str
    trainable: bool
    grad: str | None
    group: int | None
    master: str = ""

    @property
    def held(self) -> str:
        """The dtype in which it is held and updated between steps."""
        return self.master or self.dtype

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Group:
    """An optimizer group's parameters of one dtype, as measured by real steps on meta tensors.

    State: `state_per_element` bytes for each element and `state_per_slice` bytes for each parameter handed in.
    Scratch of one step: `scratch_largest` bytes per element of the largest slice plus `scratch_all` bytes per
    element of all slices (`foreach` and `fused` differ here).
    """

    index: int
    dtype: str
    options: str
    state_per_element: float
    state_per_slice: float
    scratch_largest: float
    scratch_all: float


@dataclass(frozen=True, slots=True)
class Optimizer:
    name: str
    groups: tuple[Group, ...]
    assumed: bool = False

    def facts(self, index: int, dtype: str) -> Group:
        """What is known of group `index` for parameters of `dtype`."""
        return next(group for group in self.groups if (group.index, group.dtype) == (index, dtype))


@dataclass(frozen=True)
class Graph:
    """One micro-batch, forward and backward, in the order it was traced.

    `ops` lists forward ops first, then backward ops. `buffers`, `batch` and `constants` are values that exist before
    the first op. `outputs` are handed back to the caller: the loss first, then the leaves of `aux`.
    `stages` are what `annotate` left on modules: module name -> stage. `regions` are the modules whose forward the user
    handed to `torch.utils.checkpoint`, or that called it; "" is the loss: hints, the graph itself recomputes nothing.
    """

    tensors: tuple[Tensor, ...]
    values: Mapping[str, Value]
    storages: Mapping[str, int]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    optimizer: Optimizer = field(default_factory=lambda: Optimizer("none", ()))
    device: str = "cpu"
    stages: Mapping[str, int] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def op(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def tensor(self) -> Mapping[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def derived(self) -> Mapping[str, frozenset[str]]:
        """Which parameters a value is: itself, a view, a cast or a chain of these. Value name -> tensor names."""
        derived = {tensor.name: frozenset({tensor.name}) for tensor in self.tensors}
        for op in self.ops:
            if op.kind in (OpKind.VIEW, OpKind.CAST) and op.inputs and all(name in derived for name in op.inputs):
                origin = frozenset().union(*(derived[name] for name in op.inputs))
                derived.update(dict.fromkeys(op.outputs, origin))
        return derived

    @cached_property
    def hash(self) -> str:
        """Names, shapes, dtypes and ops: the same for the same model on every rank and in every run."""
        return digest(
            [
                [(t.name, t.aliases, t.shape, t.dtype, t.trainable, t.grad, t.group, t.master) for t in self.tensors],
                sorted((v.name, v.shape, v.dtype, v.storage) for v in self.values.values()),
                [
                    (op.name, op.target, op.inputs, op.outputs, op.phase.value, op.kind.value, op.literals)
                    for op in self.ops
                ],
                [self.outputs, self.buffers, self.batch, self.constants, self.device],
                # What an optimizer does with its states, not at which learning rate.
                [self.optimizer.name, [repr(replace(group, options="")) for group in self.optimizer.groups]],
                [sorted(self.storages.items()), [op.workspace for op in self.ops]],
            ]
        )

    @cached_property
    def structure(self) -> str:
        """What is computed from what, whatever the order of ops and their names: equal where only these differ."""
        of = {name: f"buffer {name}" for name in self.buffers} | {name: f"batch {name}" for name in self.batch}
        of |= {tensor.name: f"parameter {tensor.name}" for tensor in self.tensors}
        of |= {name: f"constant {name}" for name in self.constants}
        ops = []
        for op in self.ops:
            found = digest([op.target, op.literals, op.phase.value, [of[name] for name in op.inputs]])
            ops.append(found)
            for index, name in enumerate(op.outputs):
                value = self.values[name]
                of[name] = f"{found} {index} {value.dtype}{value.shape}"
        grads = [(tensor.name, of[tensor.grad]) for tensor in self.tensors if tensor.grad is not None]
        return digest([sorted(ops), [of[name] for name in self.outputs], grads])


def digest(content: Any) -> str:
    """Sixteen hex digits of SHA-256 over canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
