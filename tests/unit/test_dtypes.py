"""Which dtype each parameter computes in and is held in, and what a traced model makes of its inputs."""

import pytest
import torch
from torch import nn

import zplan
from zplan.errors import SpecError, TraceError
from zplan.graph.dtypes import Dtypes, dtypes_of
from zplan.precision import Precision

LOW, WIDE = torch.bfloat16, torch.float32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.wide = nn.Linear(4, 4).double()
        self.low = nn.Linear(4, 4).bfloat16()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.ones(4))


def of(model: nn.Module, **says: object) -> dict[str, Dtypes]:
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return dtypes_of(model, Precision(compute="bf16", **says), trained)


def test_what_is_trained_is_held_in_fp32_at_least_and_anything_else_as_it_is() -> None:
    found = of(Model())
    assert found["first.weight"] == found["scale"] == found["low.bias"] == Dtypes(LOW, WIDE)
    assert found["frozen.weight"] == Dtypes(LOW, WIDE)
    assert found["wide.weight"] == Dtypes(LOW, torch.float64)
    frozen = Model()
    frozen.low.requires_grad_(False)
    assert of(frozen)["low.weight"] == Dtypes(LOW, LOW)


def test_modules_with_running_statistics_keep_their_dtype_unless_named() -> None:
    assert of(Model())["block.1.weight"] == Dtypes(WIDE, WIDE)
    assert of(Model())["block.2.weight"] == Dtypes(LOW, WIDE)
    assert of(Model(), modules={"block": "bf16"})["block.1.weight"] == Dtypes(WIDE, WIDE)
    assert of(Model(), modules={"block.1": "bf16"})["block.1.weight"] == Dtypes(LOW, WIDE)


def test_the_innermost_module_that_is_named_decides_and_of_its_patterns_the_first() -> None:
    found = of(Model(), modules={"block": "fp32", "block.0": "fp16", "*.0": "bf16"})
    assert found["block.0.weight"].compute == torch.float16
    assert found["block.2.weight"].compute == WIDE
    assert found["first.weight"].compute == LOW


def test_a_pattern_that_matches_no_module_is_refused_with_what_is_near() -> None:
    with pytest.raises(SpecError, match="precision: 'frist' matches no module; nearest: first"):
        of(Model(), modules={"frist": "fp32"})
    with pytest.raises(
        SpecError, match=r"'first\.weight' matches no module: it matches a parameter, and a dtype belongs"
    ):
        of(Model(), modules={"first.weight": "fp32"})


def test_a_tied_parameter_that_would_compute_in_two_dtypes_is_refused() -> None:
    model = Model()

    model.again = nn.Linear(4, 4)
    model.again.weight = model.first.weight
    with pytest.raises(SpecError, match=r"tied parameter first\.weight would compute in two dtypes"):
        of(model, modules={"again": "fp32"})


class Sees(nn.Module):
    """Returns the dtypes that arrive, as numbers of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, int]]:
        y = self.inner(x)
        return self.outer(y + more["x"]), {"x": x.itemsize, "more": more["x"].itemsize, "y": y.itemsize}


def sees(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, int]]:
    out, seen = model(batch, more={"x": batch})
    return out.float().sum(), {**seen, "out": out.itemsize}


def test_inputs_of_the_model_are_cast_and_a_named_module_is_an_island() -> None:
    batch = torch.ones(2, 4)
    precision = Precision(compute="bf16", modules={"inner": "fp32"})
    step = zplan.compile(Sees(), sees, batch, optimizer=torch.optim.SGD, stage=0, precision=precision)
    assert step(batch)[1] == {"x": 2, "more": 2, "y": 2, "out": 2}
    assert {t.name: (t.dtype, t.master) for t in step.plan.graph.tensors if t.name.endswith("bias")} == {
        "inner.bias": ("fp32", ""),
        "outer.bias": ("bf16", "fp32"),
    }


def test_tracing_leaves_no_hooks_behind() -> None:
    model, batch = Sees(), torch.ones(2, 4)
    zplan.plan(model, sees, batch, precision="bf16")
    assert sees(model, batch)[1] == {"x": 4, "more": 4, "y": 4, "out": 4}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.table)


def test_a_buffer_keeps_its_dtype_and_the_error_that_follows_says_so() -> None:
    words = r"given torch\.bfloat16 and torch\.float32\n--> test_dtypes\.py:\d+\n.* buffers keep their dtype"
    with pytest.raises(TraceError, match=words):
        zplan.plan(Table(), lambda model, x: model(x).sum(), torch.ones(2, 4), precision="bf16")
