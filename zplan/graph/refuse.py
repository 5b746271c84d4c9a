"""Refuse: what cannot be captured, each by the user's own name, with what would help."""

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from zplan.errors import TraceError
from zplan.graph import compat
from zplan.graph.ir import Phase
from zplan.graph.sites import Site

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_LATER = "it would depend on values that exist only when a step runs"


def model(model: Any) -> None:
    """Raises TraceError for the first part of a model that the trace cannot honour."""
    if not isinstance(model, nn.Module):
        raise TraceError(f"model is a {_kind(model)}, not a torch.nn.Module")
    for name, module in model.named_modules():
        _module(name or "the model", module)
    for name, parameter in model.named_parameters():
        _parameter(name, parameter)
    for name, buffer in model.named_buffers():
        plain(f"buffer {name}", buffer)
    _overlaps(model)


def _module(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise TraceError(
            f"{name} is wrapped in {kind}, which does what zplan does\ntry: pass the module inside (`.module`)"
        )
    if kind == "OptimizedModule" or isinstance(module, torch.jit.ScriptModule):
        raise TraceError(f"{name} is compiled already ({kind})\ntry: pass the module it was made from")
    if type(module).__module__.startswith("torch.ao.nn.quantized"):
        raise TraceError(f"{name} ({kind}) is quantised\ntry: plan the model before it is quantised")
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        raise TraceError(
            f"{name}.weight gets a sparse gradient, which no bucket can hold\ntry: {kind}(..., sparse=False)"
        )
    if isinstance(module, nn.RNNBase) and module.training and module.dropout and module.num_layers > 1:
        raise TraceError(
            f"{name} ({kind}) has dropout between its layers, which torch loses when it is captured (seen on 2.13)\n"
            f"try: {kind}s of one layer each, with nn.Dropout between them"
        )
    if compat.boxed_hooks(module):
        raise TraceError(
            f"{name} ({kind}) has backward hooks; a captured graph runs none of them\n"
            "try: remove them, or do their work in a torch.autograd.Function"
        )
    for hook in compat.forward_hooks(module):
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            old = "weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm"
            raise TraceError(
                f"{name}.{hook.name} is set by torch.nn.utils.{old}, whose hook replaces the weight behind the trace\n"
                f"try: torch.nn.utils.parametrizations.{old}"
            )


def _parameter(name: str, parameter: torch.Tensor) -> None:
    if is_lazy(parameter):
        raise TraceError(
            f"parameter {name} has no shape yet (a lazy module)\ntry: run the model once on one batch first"
        )
    plain(f"parameter {name}", parameter)
    if parameter.requires_grad and not parameter.dtype.is_floating_point:
        raise TraceError(
            f"parameter {name} is trainable and {parameter.dtype}: only floating-point parameters train here"
        )
    if compat.tensor_hooks(parameter):
        raise TraceError(
            f"parameter {name} has gradient hooks; a captured graph runs none of them\n"
            "try: remove them, and scale or mask inside the model or the loss"
        )


def plain(what: str, tensor: torch.Tensor) -> None:
    """Refuses quantised and sparse tensors, and subclasses."""
    kind = type(tensor)
    if tensor.is_quantized:
        raise TraceError(f"{what} is quantised ({tensor.dtype})\ntry: plan the model before it is quantised")
    if kind not in (torch.Tensor, nn.Parameter):
        help = "\ntry: full_tensor(); zplan shards by itself" if kind.__name__ == "DTensor" else ""
        raise TraceError(f"{what} is a {kind.__module__}.{kind.__qualname__}, not a plain tensor{help}")
    if tensor.layout is not torch.strided:
        raise TraceError(f"{what} is sparse ({tensor.layout})\ntry: to_dense()")


def _overlaps(model: nn.Module) -> None:
    """Two parameters in the same memory without being the same tensor would come apart."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in model.named_parameters():
        if tensor.numel() and tensor.device.type != "meta":
            start = tensor.data_ptr()
            end = start + tensor.itemsize * (
                1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            )
            spans.setdefault(compat.storage_key(tensor), []).append((start, end, name))
    for shared in spans.values():
        shared.sort()
        for (_, end, first), (start, _, second) in pairwise(shared):
            if start < end:
                raise TraceError(
                    f"parameters {first} and {second} share memory without being one tensor\n"
                    f"try: tie them as one parameter, `b.weight = a.weight`"
                )


def loss(result: Any, *, trains: bool = True) -> torch.Tensor:
    """Returns the loss of what loss_fn returned, `loss` or `(loss, aux)`. `trains`: it must reach a parameter."""
    value = result[0] if isinstance(result, tuple) and len(result) == 2 else result
    if not isinstance(value, torch.Tensor):
        raise TraceError(f"loss_fn returned a {_kind(result)}\ntry: return the loss, a scalar tensor, or (loss, aux)")
    if value.numel() != 1:
        raise TraceError(f"loss_fn returned a loss of shape {tuple(value.shape)}\ntry: its mean() or sum()")
    if not value.dtype.is_floating_point:
        raise TraceError(f"loss_fn returned a loss of {value.dtype}\ntry: a floating-point loss")
    if trains and not value.requires_grad:
        raise TraceError(
            "the loss depends on no trainable parameter: nothing to train\n"
            "try: look for detach(), torch.no_grad(), argmax, or parameters with requires_grad=False"
        )
    return value


def leaves(fixed: Mapping[int, Any], paths: Sequence[str], what: str) -> None:
    """Refuses objects that may hide tensors: only tensors and plain values may be leaves."""
    for i, leaf in fixed.items():
        if not isinstance(leaf, _PLAIN):
            raise TraceError(
                f"{what} {paths[i]}, a {_kind(leaf)}: neither a tensor nor a plain value\n"
                "try: tuples, lists and dicts of tensors, as in dict(batch)"
            )


def outside(parameter: torch.Tensor, loss_fn: Callable[..., Any]) -> NoReturn:
    name = closed_over(loss_fn).get(id(parameter), "")
    who = f"{name}, " if name else ""
    raise TraceError(
        f"the loss depends on a parameter outside the model: {who}shape {tuple(parameter.shape)}, {parameter.dtype}\n"
        "try: make it part of the model (a submodule or register_parameter), or use it under torch.no_grad()"
    )


def gradient(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        raise TraceError(f"{name} gets a sparse gradient, which no bucket can hold\ntry: sparse=False")


def arrow(site: Site | None) -> str:
    """Points at the user's own line, and into the package that it calls."""
    if site is None:
        return "--> no line of yours: it happened inside torch"
    inside = f"\n    in {site.inside}: {site.inside.source}" if site.inside else ""
    return f"--> {site}: {site.source}{inside}"


def explain(error: Exception, site: Site | None, phase: Phase) -> TraceError:
    """What happened, on which of the user's lines, and what would help."""
    text = str(error).strip().split("\n\n")[0]
    function = str(getattr(error, "func", ""))
    if isinstance(error, compat.DATA_DEPENDENT) or "get value out of a tracing tensor" in text:
        shape = any(word in function for word in ("nonzero", "masked_select", "unique", "repeat_interleave"))
        if shape:
            what, help = (
                "makes a tensor whose shape depends on values",
                "torch.where(mask, x, 0), or weights times a mask",
            )
        else:
            what, help = "reads a value out of a tensor", "torch.where in place of a branch; return the tensor in aux"
        return TraceError(f"the graph cannot be captured, {_LATER}\n{arrow(site)}\n{function} {what}\ntry: {help}")
    where = "the forward" if phase is Phase.FORWARD else "the backward"
    help = ""
    if "INTERNAL ASSERT FAILED" in text:
        text = "torch cannot capture a write into a tensor that is neither a parameter, a buffer nor an input"
        help = "\ntry: register_buffer for what the forward writes into"
    elif "Generator" in text:
        text = "a torch.Generator of one's own cannot be captured"
        help = "\ntry: the default generator (torch.manual_seed seeds it)"
    elif "a second time" in text or (site and ".backward(" in site.source):
        help = "\ntry: return the loss and leave backward() to zplan"
    elif isinstance(error, compat.UNSUPPORTED):
        help = "\ntry: give the operator a fake implementation (torch.library.register_fake)"
    elif ".numpy()" in text or "numpy" in text:
        help = "\ntry: stay in torch; NumPy cannot be captured"
    return TraceError(f"{where} raised {type(error).__name__}: {text}\n{arrow(site)}{help}")


@contextmanager
def draws_outside_torch() -> Iterator[None]:
    """Refuses draws from Python's and NumPy's generators: the graph would repeat one draw forever. Puts them back."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate()
    numpy_before = None if numpy is None else numpy.random.get_state()
    moved = ""
    try:
        yield
        if random.getstate() != before:
            moved = "Python's `random`"
        elif numpy is not None and not _same(numpy.random.get_state(), numpy_before):
            moved = "`numpy.random`"
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(numpy_before)
    if moved:
        raise TraceError(
            f"the model or loss draws from {moved}: the graph would keep that one draw in every step\n"
            "try: torch.rand(...)"
        )


def _same(a: Any, b: Any) -> bool:
    return all(bool((x == y).all()) if hasattr(x, "all") else x == y for x, y in zip(a, b, strict=True))


def closed_over(loss_fn: Any) -> dict[int, str]:
    """Names of the tensors that a loss function can reach without the model. id(tensor) -> name."""
    names: dict[int, str] = {}
    for name, value in _reached(loss_fn):
        for key, tensor in _tensors(name, value):
            names.setdefault(id(tensor), key)
    return names


def attributes(model: nn.Module) -> dict[int, str]:
    """Names of the tensors that modules hold as plain attributes. id(tensor) -> name."""
    names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not attribute.startswith("_") or isinstance(value, torch.Tensor):
                for key, tensor in _tensors(f"{prefix}.{attribute}" if prefix else attribute, value, modules=False):
                    names.setdefault(id(tensor), key)
    return names


def _reached(fn: Any) -> Iterator[tuple[str, Any]]:
    while hasattr(fn, "func"):  # functools.partial
        yield from [(f"argument {i}", value) for i, value in enumerate(fn.args)]
        yield from fn.keywords.items()
        fn = fn.func
    if inspect.ismethod(fn):
        yield from vars(fn.__self__).items() if hasattr(fn.__self__, "__dict__") else ()
        fn = fn.__func__
    if inspect.isfunction(fn):
        reached = inspect.getclosurevars(fn)
        yield from reached.nonlocals.items()
        yield from reached.globals.items()
    elif hasattr(fn, "__dict__"):
        yield from vars(fn).items()


def _tensors(name: str, value: Any, *, modules: bool = True) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, nn.Module) and modules:
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f"{name}.{key}", tensor
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, torch.Tensor):
                yield f"{name}[{key!r}]", item
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                yield f"{name}[{i}]", item


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
