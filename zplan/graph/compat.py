"""Every private torch name that zplan leans on, alone, so that a new torch breaks one file.

Tested on torch 2.11.0, 2.13.0 and 2.14.1. Beside each name: what it does here, and what moves between these.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher  # 2.11 to 2.14
from torch._subclasses.fake_tensor import (  # 2.11 to 2.14
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import (  # 2.11 to 2.14, which adds an argument to dispatch_functionalize
    FunctionalTensorMode,
    dispatch_functionalize,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx  # 2.11 to 2.14
from torch.nn.utils.stateless import _reparametrize_module  # 2.11 to 2.14
from torch.utils import _pytree as pytree  # 2.11 to 2.14
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11 to 2.14

__all__ = [
    "BACKWARD_OF_MODULE",
    "DATA_DEPENDENT",
    "OF_MODULE",
    "TENSORS_OF_MODULE",
    "UNSUPPORTED",
    "TorchDispatchMode",
    "autocast_cache",
    "boxed_hooks",
    "capture",
    "compiling_state",
    "dropout_of",
    "eager_dropout",
    "fake_mode",
    "forward_hooks",
    "functional_collectives",
    "is_mutable",
    "is_op",
    "memory_events",
    "memory_profile",
    "on_new_node",
    "pytree",
    "reparametrize",
    "sequence_number",
    "sequence_number_of",
    "storage_key",
    "straight_through_checkpoint",
    "tensor_hooks",
]

# 2.11 to 2.14: torch.ops._c10d_functional; all its ops take the group's name as a `str`.
functional_collectives = torch.ops._c10d_functional

# 2.11 to 2.14: what a fake tensor raises when an op needs values (`.item()`, `if tensor:`, `nonzero()`).
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
UNSUPPORTED = UnsupportedOperatorException

# 2.11 to 2.14: attributes of a Module that hold its backward hooks.
BACKWARD_OF_MODULE = ("_backward_hooks", "_backward_pre_hooks")

# 2.11 to 2.14: attributes that every Module has, and those in which it keeps parameters, buffers and submodules.
OF_MODULE = frozenset(vars(nn.Module()))
TENSORS_OF_MODULE = ("_parameters", "_buffers", "_modules")


def fake_mode() -> FakeTensorMode:
    """Tensors without memory; real tensors met on the way are read for their shape only."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def compiling_state() -> Iterator[None]:
    """`torch.compiler.is_compiling()` and `is_exporting()` are true inside, as in `torch.export`.

    2.11 to 2.14: two flags.
    """
    with (
        patch.object(torch.compiler, "_is_compiling_flag", True),
        patch.object(torch.compiler, "_is_exporting_flag", True),
    ):
        yield


def reparametrize(module: nn.Module, tensors: dict[str, torch.Tensor]) -> AbstractContextManager[None]:
    """`module` holds `tensors` inside; an alias of a tied tensor follows its first name."""
    return _reparametrize_module(module, tensors, tie_weights=True)


def capture(fn: Callable[..., Any], arguments: tuple[Any, ...], mode: FakeTensorMode) -> fx.GraphModule:
    """Returns fn as one functional graph of ATen ops; its arguments and outputs are pytrees of tensors.

    The mode of `dispatch_functionalize` is a fresh one: its default is shared by everyone in the process.
    """
    with ExitStack() as stack:
        stack.enter_context(compiling_state())
        stack.enter_context(mode)
        stack.enter_context(eager_dropout())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(fx.traceback.preserve_node_meta())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        graph_module: fx.GraphModule = make_fx(dispatch_functionalize(fn, FunctionalTensorMode()))(*arguments)
    return graph_module


@contextmanager
def on_new_node(note: Callable[[fx.Node, torch.Tensor | None], None]) -> Iterator[None]:
    """Inside a capture: calls `note` with each node as it is made, and the tensor behind it if it is a constant.

    Wraps the running tracer, this object only.
    """
    mode = get_proxy_mode()
    assert mode is not None, "on_new_node outside of a capture"
    tracer: Any = mode.tracer
    create = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = create(*args, **kwargs)
        note(node, getattr(tracer.root, str(node.target)) if node.op == "get_attr" else None)
        return node

    tracer.create_node = create_node
    try:
        yield
    finally:
        del tracer.create_node


@contextmanager
def autocast_cache() -> Iterator[None]:
    """Under autocast a weight that is used twice is cast once, as in eager; `make_fx` alone switches that off.

    2.11 to 2.14.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


def sequence_number() -> int:
    """What autograd will number its next node with, in this thread. 2.11 to 2.14."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def sequence_number_of(grad_fn: Any) -> int:
    """2.11 to 2.14: nodes of autograd carry the number they were made with."""
    return int(grad_fn._sequence_nr())


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory, fake ones too; unique while one of them is alive. 2.11 to 2.14."""
    return int(tensor.untyped_storage()._cdata)


def tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` left something on a tensor. 2.11 to 2.14."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def boxed_hooks(module: nn.Module) -> bool:
    """Whether a module has backward hooks. 2.11 to 2.14."""
    return any(getattr(module, name, None) for name in BACKWARD_OF_MODULE)


def is_op(target: Any) -> bool:
    """Whether a call's target is one operator, not one that holds a graph of its own. 2.11 to 2.14."""
    return isinstance(target, torch._ops.OpOverload)


def is_mutable(target: Any) -> bool:
    """Whether an ATen op writes into an argument. 2.11 to 2.14."""
    return bool(target._schema.is_mutable)


def dropout_of(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """The `dropout_p` of a call, None where the op has none. 2.11 to 2.14."""
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = kwargs.get("dropout_p", args[i] if i < len(args) else argument.default_value)
            return float(value)
    return None


def forward_hooks(module: nn.Module) -> tuple[Any, ...]:
    """A module's own forward pre-hooks. 2.11 to 2.14."""
    hooks: Mapping[int, Any] = module._forward_pre_hooks
    return tuple(hooks.values())


@contextmanager
def straight_through_checkpoint(note: Callable[[Any], None]) -> Iterator[None]:
    """`torch.utils.checkpoint` calls its function and does nothing else inside; `note` gets the function.

    Traced as it is, a checkpointed region redraws its dropout masks: silently wrong gradients. User code holds
    `checkpoint` itself, so the two things it calls are swapped, for the time of one trace. 2.11 and 2.13 call `old`;
    2.14 keeps that name, but calls `new`.
    """

    def once(fn: Any, *_: Any, **__: Any) -> Iterator[None]:
        note(fn)
        yield

    def apply(fn: Any, preserve_rng_state: bool, *args: Any) -> Any:
        note(fn)
        return fn(*args)

    module = torch.utils.checkpoint
    old, new = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"
    with (
        patch.object(module, new if hasattr(module, new) else old, once),
        patch.object(module.CheckpointFunction, "apply", apply),
    ):
        yield


@contextmanager
def eager_dropout() -> Iterator[None]:
    """On a CPU, `dropout` of 16-bit values is traced as what eager runs: x * (mask / (1 - p)), rounded in between.

    torch traces `native_dropout`, whose backward rounds elsewhere, and which draws even where p = 1; else, in 32 bit,
    it gives the same bits. 2.11 to 2.14: the table of Python kernels of one operator, changed while one trace runs.
    """
    op: Any = torch.ops.aten.dropout.default
    before = dict(op.py_kernels)

    def kernel(traced: Callable[..., Any]) -> Callable[..., Any]:
        def dropout(input: torch.Tensor, p: float, train: bool) -> Any:
            if input.device.type != "cpu" or not train or p == 0:
                return traced(input, p, train)
            if p == 1:
                return input * input.new_zeros(())
            if input.dtype in (torch.bfloat16, torch.float16):
                return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
            return traced(input, p, train)

        return dropout

    op.py_kernels.update({key: kernel(traced) for key, traced in before.items()})
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels.update(before)
        op._dispatch_cache.clear()


def memory_profile() -> torch.profiler.profile:
    """A profiler of the CPU's memory. 2.11 warns about a second cycle, which is not run here, unless `acc_events`."""
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    )


def memory_events(profile: torch.profiler.profile) -> list[int]:
    """Bytes of every CPU allocation (above zero) and release, in the order in which they came. 2.11 to 2.14."""
    recorder: Any = profile.profiler
    events = [event for event in recorder.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
