"""Precision: the dtype that each parameter computes in and is held in, and the casts at the borders between dtypes."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from zplan.errors import SpecError, nearest
from zplan.graph.compat import pytree
from zplan.precision import Precision

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Of a parameter: in forward and backward, and between steps."""

    compute: torch.dtype
    held: torch.dtype


def dtypes_of(model: nn.Module, precision: Precision | None, trained: Collection[str]) -> dict[str, Dtypes]:
    """Parameter name -> its dtypes. What is trained is held in fp32 at least, anything else as the model has it.

    Raises `SpecError` for a pattern that matches no module, and for a tied parameter that computes in two dtypes.
    """
    if precision is None:
        return {name: Dtypes(p.dtype, p.dtype) for name, p in model.named_parameters()}
    islands = _islands(model, precision)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, Dtypes] = {}
    for name, parameter in model.named_parameters():
        own = parameter.dtype
        if not own.is_floating_point:
            found[name] = Dtypes(own, own)
            continue
        by = {alias: _compute(model, alias, own, islands, precision) for alias in names[id(parameter)]}
        if len(set(by.values())) > 1:
            answers = ", ".join(f"{alias}: {dtype}" for alias, dtype in by.items())
            raise SpecError(f"tied parameter {name} would compute in two dtypes ({answers}): name both modules alike")
        held = torch.promote_types(own, torch.float32) if name in trained else own
        found[name] = Dtypes(by[name], held)
    return found


@contextmanager
def casts(model: nn.Module, precision: Precision | None) -> Iterator[None]:
    """Inside, floating inputs of the model and of modules with a dtype of their own are cast, outputs of these back.

    By hooks, which are gone at the end.
    """
    with ExitStack() as stack:
        if precision is not None:
            islands = _islands(model, precision)
            for name, module in model.named_modules():
                if name and name not in islands:
                    continue
                inside = islands.get(name, DTYPES[precision.compute])
                handle = module.register_forward_pre_hook(_on_the_way_in(inside), with_kwargs=True)
                stack.callback(handle.remove)
                if name:
                    outside = _around(name.rpartition(".")[0], islands, precision)
                    stack.callback(module.register_forward_hook(_on_the_way_out(outside)).remove)
        yield


def _islands(model: nn.Module, precision: Precision) -> dict[str, torch.dtype]:
    """Module name -> the dtype that a pattern gives it."""
    modules = [name for name, _ in model.named_modules()]
    for pattern in precision.modules:
        if not any(fnmatchcase(name, pattern) for name in modules):
            near = nearest(pattern.replace("*", ""), modules)
            if any(fnmatchcase(name, pattern) for name, _ in model.named_parameters(remove_duplicate=False)):
                near = ": it matches a parameter, and a dtype belongs to a whole module"
            raise SpecError(f"precision: {pattern!r} matches no module{near}")
    found: dict[str, torch.dtype] = {}
    for name in modules:
        for pattern, dtype in precision.modules.items():
            if fnmatchcase(name, pattern):
                found[name] = DTYPES[dtype]
                break
    return found


def _compute(
    model: nn.Module, name: str, own: torch.dtype, islands: Mapping[str, torch.dtype], precision: Precision
) -> torch.dtype:
    holder = name.rpartition(".")[0]
    if holder not in islands and keeps(model.get_submodule(holder)):
        return own
    return _around(holder, islands, precision)


def keeps(module: nn.Module) -> bool:
    """Whether a module has running statistics: torch's kernels then want its parameters in their dtype, fp32."""
    return isinstance(getattr(module, "running_mean", None), torch.Tensor)


def _around(module: str, islands: Mapping[str, torch.dtype], precision: Precision) -> torch.dtype:
    """The compute dtype at a module: of the innermost around it that has one."""
    while module not in islands:
        if not module:
            return DTYPES[precision.compute]
        module = module.rpartition(".")[0]
    return islands[module]


def _on_the_way_in(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast(args, dtype), _cast(kwargs, dtype)

    return cast


def _on_the_way_out(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(_: nn.Module, __: Any, output: Any) -> Any:
        return _cast(output, dtype)

    return cast


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, tree)
