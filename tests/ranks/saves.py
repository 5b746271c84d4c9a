"""What the tests of saves share: a model whose training is exact at every layout, and the whole state of a step."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zplan
from zplan.runtime.comm import Comm
from zplan.runtime.store import Manifest, Reader, read_manifest

# (ranks, stage)
LAYOUTS = [(1, 0), (2, 2), (3, 3), (4, 1)]


class Exact(nn.Module):
    """Every odd kind of parameter, and gradients that are small integers whatever the weights.

    Each parameter is multiplied by integers, so all ranks that see one batch have the same integer gradient: its sum
    over any number of ranks, and that over their number, are exact. What an element-wise optimizer makes of it is then
    bit for bit the same at every number of ranks, stage and bucket size.
    """

    calls: torch.Tensor
    scratch: torch.Tensor

    def __init__(self, width: int = 5, matrix: str = "matrix") -> None:
        super().__init__()
        self.name = matrix
        self.table = nn.Embedding(7, width)
        self.register_parameter(matrix, nn.Parameter(torch.randn(33, 9)))
        self.wide = nn.Parameter(torch.randn(130))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Parameter(torch.randn(10, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(width, 7, bias=True)
        self.head.weight = self.table.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scratch += x
        matrix = getattr(self, self.name)
        trained = (self.table.weight, matrix, self.wide, self.scale, self.empty, self.low, self.head.bias)
        total = (2 * self.head.weight).sum() + self.frozen.sum()
        for p in trained:
            integers = torch.arange(p.numel(), dtype=p.dtype).view(p.shape) % 5 - 2 + x.to(p.dtype)
            total = total + (p * integers).sum().float()
        return total


def exact_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def groups(make: Any, named: Any) -> torch.optim.Optimizer:
    """Two groups, as people split for weight decay."""
    named = list(named)
    flat = [p for _, p in named if p.ndim < 2]
    return make([{"params": [p for _, p in named if p.ndim >= 2]}, {"params": flat, "weight_decay": 0.0}])


ADAMW = functools.partial(groups, functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.05, foreach=False))


def exact(comm: Comm, stage: Any, *, optimizer: Any = ADAMW, model: Any = Exact, **options: Any) -> zplan.TrainStep:
    torch.manual_seed(0)
    made = model()
    return zplan.compile(made, exact_loss, batch(0), optimizer=optimizer, group=comm.group, stage=stage, **options)


def batch(i: int) -> torch.Tensor:
    return torch.tensor(float(i % 3 - 1))


def states(step: zplan.TrainStep) -> list[tuple[str, int, int, dict[str, Any]]]:
    """This rank's optimizer states, as (bucket, start, stop, states) of each slice."""
    taken = [iter(group["params"]) for group in step.optimizer.param_groups]
    found = []
    for piece in step.plan.ownership.slices(step._comm.rank):
        state = step.optimizer.state.get(next(taken[piece.group]), {})
        found.append((piece.bucket, piece.start, piece.stop, {k: _copy(v) for k, v in state.items()}))
    return found


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def whole(ownership: Any, of_ranks: list[list[tuple[str, int, int, dict[str, Any]]]]) -> dict[str, Any]:
    """(state, parameter) -> the whole of it, put together from what every rank holds, without the code of saves."""
    found: dict[str, Any] = {}
    for bucket in ownership.buckets:
        mine = [piece for of_rank in of_ranks for piece in of_rank if piece[0] == bucket.name]
        for slot in bucket.slots:
            for _, start, stop, state in mine:
                for name, value in state.items():
                    low, high = max(start, slot.offset), min(stop, slot.end)
                    if low >= high:
                        continue
                    key = f"{name} of {slot.tensor}"
                    if not isinstance(value, torch.Tensor) or not value.dim():
                        known = found.setdefault(key, value)
                        assert known == value, key
                        continue
                    flat = found.setdefault(key, torch.full((slot.numel,), float("nan"), dtype=value.dtype))
                    flat[low - slot.offset : high - slot.offset] = value[low - start : high - start]
    return found


def contents(path: str | Path) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """All that a save holds."""
    manifest = read_manifest(Path(path))
    reader = Reader(path, manifest)
    return manifest, {key: reader.read(key) for key in manifest.tensors}


def assert_same_save(one: str | Path, other: str | Path, *, without: tuple[str, ...] = ()) -> None:
    """Bit for bit, whatever files they are in. `without`: keys that start so."""
    (a, mine), (b, theirs) = contents(one), contents(other)
    mine, theirs = ({k: v for k, v in each.items() if not k.startswith(without)} for each in (mine, theirs))
    assert sorted(mine) == sorted(theirs)
    for key, tensor in mine.items():
        assert tensor.dtype == theirs[key].dtype, key
        assert torch.equal(tensor.view(torch.uint8), theirs[key].view(torch.uint8)), key
    assert a.contents.model_copy(update={"world": 0}) == b.contents.model_copy(update={"world": 0})


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two flat dicts of tensors and numbers, bit for bit."""
    assert sorted(one) == sorted(other)
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[key].dtype, key
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


def words(call: Any) -> str:
    """The error that a call ends with."""
    try:
        call()
    except zplan.ZplanError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
