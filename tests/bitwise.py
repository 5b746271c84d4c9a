"""A traced graph against eager PyTorch: the same bits, in the same memory."""

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from zplan.graph import compat
from zplan.graph.trace import Trace


def inputs(model: nn.Module, batch: Any) -> list[Tensor]:
    leaves = [leaf for leaf in compat.pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [*(p.detach() for p in model.parameters()), *model.buffers(), *leaves]


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else bool(a == b)


def assert_bitwise(traced: Trace, model: nn.Module, loss_fn: Callable[..., Any], batch: Any) -> None:
    """Three steps without update: outputs, gradients, buffers and draws of both, from the same seed."""
    copied = copy.deepcopy(model)
    graph = traced.graph
    for seed in range(3):
        torch.manual_seed(seed)
        result = loss_fn(model, batch)
        model.zero_grad(set_to_none=True)
        (result[0] if isinstance(result, tuple) else result).backward()
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        with torch.no_grad():
            got = traced.module(*inputs(copied, batch))
        assert torch.equal(torch.get_rng_state(), state), "other draws"
        outputs = traced.unflatten(got[: len(graph.outputs)])
        for a, b in zip(*map(compat.pytree.tree_leaves, (result, outputs)), strict=True):
            assert same(a, b)
        names = [tensor.name for tensor in graph.tensors if tensor.grad is not None]
        grads = dict(zip(names, got[len(graph.outputs) :], strict=True))
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (name not in grads), name
            assert name not in grads or same(parameter.grad, grads[name]), name
        for (name, a), (_, b) in zip(model.named_buffers(), copied.named_buffers(), strict=True):
            assert same(a, b), name


class Storages(fx.Interpreter):
    """Runs a graph for real and remembers in which memory each result was; nothing is let go."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.where: dict[str, tuple[int, ...]] = {}
        self.kept: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.kept.append(result)
        self.where[n.name] = tuple(
            compat.storage_key(x) for x in compat.pytree.tree_leaves(result) if isinstance(x, Tensor)
        )
        return result


def assert_aliases(traced: Trace, model: nn.Module, batch: Any) -> None:
    """Values share a storage exactly where their tensors share memory."""
    real = Storages(traced.module)
    with torch.no_grad():
        real.run(*inputs(copy.deepcopy(model), batch))
    owner: dict[int, str] = {}
    for name, node in traced.node.items():
        (key,) = real.where[node.name]
        value = traced.graph.values[name]
        assert owner.setdefault(key, value.storage) == value.storage, (name, value.storage)
    assert len(set(owner.values())) == len(owner) == len(traced.graph.storages)


def snapshot(model: nn.Module) -> list[Any]:
    """All that a trace could leave behind: random states, and every attribute, container and tensor of every module."""
    kept: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            kept.append((name, key, id(value)))
            if isinstance(value, dict):
                kept.append([(k, id(v)) for k, v in value.items()])
            elif isinstance(value, list):
                kept.append([id(v) for v in value])
            elif isinstance(value, set):
                kept.append(set(value))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kept.append(
            (name, id(tensor), tensor.detach().clone().tolist(), id(tensor.grad), tensor.requires_grad, tensor._version)
        )
    return kept
