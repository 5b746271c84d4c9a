"""What an optimizer keeps and takes is measured by its own steps, and is what real steps on the CPU keep and take."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.profiler import ProfilerActivity, profile

from tests.models import OddMLP
from zplan.errors import SpecError
from zplan.graph.optimizer import ELEMENT_WISE, groups_of, measure, rebind

OPTIONS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    *((kind, {}) for kind in ELEMENT_WISE),
    *((kind, {"foreach": True}) for kind in ELEMENT_WISE),
    *((kind, {"fused": True}) for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)),
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.RMSprop, {"momentum": 0.5, "centered": True}),
]


def state_nbytes(optimizer: optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, torch.Tensor))


def scratch_nbytes(step: Callable[[], object]) -> int:
    """The peak of real CPU allocations of one call, by the profiler: another way than the one that is tested."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    alive = peak = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_facts_are_those_of_real_steps(
    kind: type[optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    factory = functools.partial(kind, lr=1e-3, **options)
    sizes = (4096, 4096, 4096, 4096)
    (facts,) = measure(factory, nn.Linear(3, 3).to(dtype)).groups
    slices = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    for parameter in slices:
        parameter.grad = torch.ones_like(parameter)
    optimizer = factory(slices)
    optimizer.step()
    assert state_nbytes(optimizer) == facts.state_per_element * sum(sizes) + facts.state_per_slice * len(sizes)
    predicted = facts.scratch_largest * max(sizes) + facts.scratch_all * sum(sizes)
    assert predicted == pytest.approx(scratch_nbytes(optimizer.step), abs=0.1 * max(sizes))


@pytest.mark.parametrize("kind", ELEMENT_WISE)
def test_facts_do_not_depend_on_the_default_device(kind: type[optim.Optimizer]) -> None:
    facts = measure(functools.partial(kind, lr=1e-3), nn.Linear(3, 3))
    with torch.device("meta"):
        assert measure(functools.partial(kind, lr=1e-3), nn.Linear(3, 3)) == facts


def test_groups_keep_their_options_order_and_dtypes() -> None:
    def factory(named: list[tuple[str, nn.Parameter]]) -> optim.Optimizer:
        return optim.AdamW(
            [
                {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
                {"params": []},
                {"params": [p for _, p in named if p.ndim < 2], "lr": 0.5},
            ],
            lr=3e-4,
        )

    model = OddMLP()
    optimizer, groups = groups_of(factory, model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 0, 10]
    assert groups["first.weight"] == 0
    assert groups["scale"] == 2
    assert "frozen.weight" not in groups
    facts = measure(factory, model)
    assert [(group.index, group.dtype) for group in facts.groups] == [
        (0, "fp32"),
        (0, "bf16"),
        (2, "fp32"),
        (2, "bf16"),
    ]
    assert [group.state_per_element for group in facts.groups] == [8, 4, 8, 4]
    assert "weight_decay=0.1" in facts.groups[0].options
    assert "lr=0.5" in facts.groups[2].options
    assert facts.name == "AdamW"
    assert not facts.assumed


def test_no_factory_assumes_adamw() -> None:
    facts = measure(None, nn.Linear(2, 2))
    assert facts.name == "AdamW"
    assert facts.assumed
    assert facts.groups[0].options.startswith("lr=0.001, betas=(0.9, 0.999)")


def test_cuda_default_is_foreach() -> None:
    factory = functools.partial(optim.AdamW, lr=1e-3)
    (facts,) = measure(factory, nn.Linear(2, 2), device="cuda").groups
    (foreach,) = measure(functools.partial(factory, foreach=True), nn.Linear(2, 2)).groups
    assert (facts.scratch_largest, facts.scratch_all) == (foreach.scratch_largest, foreach.scratch_all) == (0, 4)


@pytest.mark.parametrize("kind", ELEMENT_WISE)
def test_rebound_slices_step_as_whole_parameters(kind: type[optim.Optimizer]) -> None:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(64))
    parts = [nn.Parameter(whole.detach()[i : i + 16].clone()) for i in range(0, 64, 16)]
    reference = kind([whole], lr=0.1, foreach=False)  # type: ignore[call-arg]
    rebound, _ = groups_of(functools.partial(kind, lr=0.1, foreach=False), nn.Linear(4, 4, bias=False))
    rebind(rebound, [parts])
    for step in range(3):
        grad = torch.randn(64)
        whole.grad = grad
        for i, part in enumerate(parts):
            part.grad = grad[16 * i : 16 * (i + 1)].clone()
        if step == 2:  # as a scheduler would
            reference.param_groups[0]["lr"] = rebound.param_groups[0]["lr"] = 0.05
        reference.step()
        rebound.step()
        assert torch.equal(torch.cat([part.detach() for part in parts]), whole.detach())


def test_rebind_needs_slices_for_each_group() -> None:
    optimizer, _ = groups_of(None, nn.Linear(2, 2))
    with pytest.raises(SpecError, match="2 groups of slices for an optimizer with 1 groups"):
        rebind(optimizer, [[], []])


def test_what_is_no_element_wise_optimizer_is_refused() -> None:
    class Mine(optim.AdamW):
        pass

    model = nn.Linear(2, 2)
    for kind in (optim.Adafactor, optim.LBFGS, Mine):
        with pytest.raises(SpecError, match=f"{kind.__name__} is not known to work element by element"):
            groups_of(kind, model)


def test_wrong_factories_are_refused() -> None:
    model = nn.Linear(2, 2)
    stranger = nn.Parameter(torch.ones(5))
    with pytest.raises(SpecError, match=r"the optimizer factory returned a int, not a torch\.optim\.Optimizer"):
        groups_of(lambda named: 3, model)  # type: ignore[arg-type, return-value]
    built = optim.AdamW(model.parameters())
    with pytest.raises(SpecError, match=r"the optimizer is a AdamW that is built already: give what builds it, as"):
        groups_of(built, model)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"the optimizer is a str, not a function of \[\(name, parameter\), ...\]"):
        groups_of("adamw", model)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"raised TypeError: .*\nit is called with \[\(name, parameter\), ...\]"):
        groups_of(functools.partial(optim.AdamW, speed=3), model)
    with pytest.raises(SpecError, match=r"optimizer group 0 holds a parameter of shape \(5,\) that is not the model's"):
        groups_of(lambda named: optim.SGD([stranger]), model)
    with pytest.raises(SpecError, match="the model has no trainable parameter"):
        groups_of(None, nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(SpecError, match="raised ValueError: some parameters appear in more than one parameter group"):
        groups_of(lambda named: optim.SGD([{"params": [p for _, p in named]}] * 2), model)
