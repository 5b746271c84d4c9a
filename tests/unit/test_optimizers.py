"""Several optimizers by pattern: which trains what, the words of every error, and all of them as one."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn, optim

import zplan
from tests.models import GPT, OddMLP
from zplan.errors import SpecError
from zplan.graph.optimizer import groups_of, measure, rebind
from zplan.graph.optimizers import Optimizers
from zplan.planner.memory import state_nbytes

ADAMW = functools.partial(optim.AdamW, lr=1e-3)
SGD = functools.partial(optim.SGD, lr=0.1, momentum=0.9)


def split(named: list[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    matrices = [p for _, p in named if p.ndim >= 2]
    others = [p for _, p in named if p.ndim < 2]
    return optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3)


def trained_by(factories: Any, model: nn.Module) -> dict[str, int]:
    return groups_of(factories, model)[1]


def test_the_first_pattern_that_matches_wins_and_groups_are_in_order() -> None:
    model = GPT(layers=1)
    optimizer, groups = groups_of({"*.bias": SGD, "*": split}, model)
    assert isinstance(optimizer, Optimizers)
    assert [type(each) for each in optimizer.optimizers] == [optim.SGD, optim.AdamW]
    for name, parameter in model.named_parameters():
        assert groups[name] == (0 if name.endswith(".bias") else 1 if parameter.ndim >= 2 else 2)
    other, groups = groups_of({"*.weight": split, "*": SGD}, model)
    assert [type(each) for each in other.optimizers] == [optim.AdamW, optim.SGD]  # type: ignore[attr-defined]
    assert {name for name, index in groups.items() if index == 2} == {
        name for name, _ in model.named_parameters() if name.endswith(".bias")
    }


def test_what_no_pattern_matches_is_in_no_group_and_noted() -> None:
    model = GPT(layers=1)
    assert set(trained_by({"blocks.*": ADAMW}, model)) == {
        name for name, _ in model.named_parameters() if name.startswith("blocks.")
    }
    plan = zplan.plan(
        model, GPT.loss_fn, model.make_batch(0), optimizer={"blocks.*": ADAMW, "norm.bias": SGD}, world_size=2, stage=1
    )
    assert "norm.weight is in no optimizer group: it gets no gradient and never changes" in plan.graph.notes
    assert "norm.bias" not in " ".join(plan.graph.notes)
    assert plan.graph.tensor["position.weight"].grad is None
    assert plan.graph.tensor["norm.bias"].grad is not None


def test_any_name_of_a_tied_parameter_matches() -> None:
    """`embed.weight` is `head.weight` too."""
    model = GPT(layers=1)
    assert trained_by({"head.*": SGD, "blocks.*": ADAMW}, model)["embed.weight"] == 0
    # Several names with the same factory: one answer, that of the first pattern; the second has nothing left.
    optimizer, groups = groups_of({"head.*": SGD, "embed.*": SGD, "*": ADAMW}, model)
    assert groups["embed.weight"] == 0
    assert [type(each) for each in optimizer.optimizers] == [optim.SGD, optim.AdamW]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("factories", "words"),
    [
        ({}, r"the optimizer is a mapping that holds nothing: give it patterns, as \{'\*\.bias': sgd, '\*': adamw\}"),
        ({3: SGD}, "the optimizer is a mapping with the key 3: give patterns of parameters' names"),
        (
            {"*": ADAMW, "blocks.0.upp.weight": SGD},
            r"optimizer pattern 2 'blocks\.0\.upp\.weight' matches no parameter; nearest: blocks\.0\.up\.weight",
        ),
        ({"q?q": ADAMW}, r"optimizer pattern 1 'q\?q' matches no parameter; the first of them is embed\.weight"),
        ({"position.*": SGD, "*": ADAMW}, r"optimizer pattern 1 'position\.\*' matches frozen parameters alone, as po"),
        (
            {"*": ADAMW, "*.bias": SGD},
            r"optimizer pattern 2 '\*\.bias' gets no parameter: '\*' before it matches first; put it before that",
        ),
        (
            {"head.*": SGD, "*": ADAMW},
            r"tied parameter embed\.weight gets different optimizers \(embed\.weight by '\*', head\.weight by "
            r"'head\.\*'\): name all of these in patterns with the same factory, before the others",
        ),
        ({"*.bias": SGD, "*": "adamw"}, r"the optimizer for '\*' is a str, not a function of \[\(name, parameter\)"),
        (
            {"*.bias": SGD(nn.Linear(1, 1).parameters()), "*": ADAMW},
            r"the optimizer for '\*\.bias' is a SGD that is built already: give what builds it",
        ),
        ({"*": functools.partial(optim.SGD, lr=-1)}, r"the optimizer factory for '\*' raised ValueError: Invalid lear"),
        ({"*": lambda named: 3}, r"the optimizer factory for '\*' returned a int, not a torch\.optim\.Optimizer"),
        (
            {"*.bias": SGD, "*": optim.Adafactor},
            r"for '\*': Adafactor is not known to work element by element, and each rank owns slices of parameters",
        ),
    ],
)
def test_wrong_mappings_are_refused(factories: Any, words: str) -> None:
    model = GPT(layers=1)
    model.position.requires_grad_(False)
    with pytest.raises(SpecError, match=words):
        groups_of(factories, model)


def test_facts_are_those_of_each_optimizer() -> None:
    model = OddMLP()
    both = measure({"*.bias": SGD, "*": split}, model)
    assert both.name == "SGD + AdamW"
    assert not both.assumed
    (sgd,) = [group for group in measure(SGD, nn.Linear(2, 2)).groups]
    adamw = measure(split, nn.Linear(2, 2)).groups[0]
    for group in both.groups:
        alone = sgd if group.index == 0 else adamw
        scale = 2 if group.dtype == "bf16" else 1
        assert group.state_per_element * scale == alone.state_per_element
        assert group.options.startswith("SGD: " if group.index == 0 else "AdamW: ")
        assert ("momentum=0.9" in group.options) == (group.index == 0)
        if scale == 1:
            assert (group.state_per_slice, group.scratch_largest, group.scratch_all) == (
                alone.state_per_slice,
                alone.scratch_largest,
                alone.scratch_all,
            )
    assert [(group.index, group.dtype) for group in both.groups] == [
        (0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16"), (2, "fp32"),
    ]  # fmt: skip


def planned(optimizer: Any, **options: Any) -> zplan.Plan:
    model = GPT(layers=1)
    return zplan.plan(
        model, GPT.loss_fn, model.make_batch(0), optimizer=optimizer, **{"world_size": 2, "stage": 2, **options}
    )


def test_a_plan_names_all_of_them_and_ranks_agree_on_them(tmp_path: Any) -> None:
    plan = planned({"*.bias": SGD, "*": split})
    assert "optimizer: SGD + AdamW, 3 groups" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert zplan.load_plan(tmp_path / "plan.json").graph.optimizer == plan.graph.optimizer
    faster = planned({"*.bias": functools.partial(SGD, lr=0.2), "*": split})
    swapped = planned({"*.weight": split, "*.bias": SGD})
    assert planned({"*.bias": SGD, "*": split}).agreement == plan.agreement
    assert len({plan.agreement, faster.agreement, swapped.agreement, planned(split).agreement}) == 4
    assert plan.hash == faster.hash, "a learning rate is no other graph"
    assert "optimizer: AdamW -> SGD + AdamW" in str(planned(split).diff(plan))


def test_state_of_each_group_is_in_the_predicted_memory() -> None:
    """SGD without momentum keeps nothing; AdamW 8 bytes an element, and the count of steps of each slice."""
    plan = planned({"*.bias": functools.partial(optim.SGD, lr=0.1), "*": ADAMW}, bucket=4_000)
    by_rank = [[s.numel for s in plan.ownership.slices(rank) if s.group == 1] for rank in range(2)]
    assert state_nbytes(plan.program) == max(8 * sum(numels) + 4 * len(numels) for numels in by_rank)


def both(seed: int = 0) -> tuple[Optimizers, list[nn.Parameter]]:
    """SGD with momentum on one parameter, AdamW in two groups on two."""
    torch.manual_seed(seed)
    optimizer, _ = groups_of({"*.bias": SGD, "*": split}, GPT(layers=1))
    parameters = [nn.Parameter(torch.randn(6)) for _ in range(3)]
    rebind(optimizer, [[p] for p in parameters])
    assert isinstance(optimizer, Optimizers)
    return optimizer, parameters


def run(optimizer: Any, parameters: list[nn.Parameter], steps: int = 1) -> None:
    for i in range(steps):
        for parameter in parameters:
            parameter.grad = torch.linspace(-1, 1, 6) * (i + 1)
        optimizer.step()


def test_all_of_them_are_one_optimizer() -> None:
    optimizer, parameters = both()
    assert isinstance(optimizer, optim.Optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups, both_groups(optimizer), strict=True))
    singles = [optim.SGD([parameters[0].detach().clone().requires_grad_()], lr=0.1, momentum=0.9)]
    singles.append(optim.AdamW([{"params": [p.detach().clone().requires_grad_()]} for p in parameters[1:]], lr=1e-3))
    singles[1].param_groups[1]["weight_decay"] = 0.0
    clones = [p for single in singles for group in single.param_groups for p in group["params"]]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.optimizers[1].register_step_post_hook(lambda *_: calls.append("AdamW"))
    run(optimizer, parameters, 3)
    for single in singles:
        run(single, [p for group in single.param_groups for p in group["params"]], 3)
    assert all(torch.equal(a, b) for a, b in zip(parameters, clones, strict=True))
    assert calls == ["before", "AdamW", "after"] * 3
    assert set(map(id, optimizer.state)) == set(map(id, parameters))
    assert len(optimizer.state) == 3
    assert set(optimizer.state[parameters[0]]) == {"momentum_buffer"}
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert repr(optimizer).startswith("Optimizers (\nParameter Group 0")


def both_groups(optimizer: Optimizers) -> list[dict[str, Any]]:
    return [group for each in optimizer.optimizers for group in each.param_groups]


def test_state_is_saved_and_loaded_together() -> None:
    one, parameters = both()
    run(one, parameters, 2)
    one.param_groups[2]["lr"] = 0.5
    saved = copy.deepcopy(one.state_dict())
    assert list(saved["state"]) == [0, 1, 2]
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1], [2]]
    two, others = both()
    with torch.no_grad():
        for mine, theirs in zip(others, parameters, strict=True):
            mine.copy_(theirs)
    two.load_state_dict(saved)
    assert two.param_groups[2]["lr"] == two.optimizers[1].param_groups[1]["lr"] == 0.5
    assert set(map(id, two.optimizers[0].state)) == {id(others[0])}
    run(one, parameters, 2)
    run(two, others, 2)
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    # One of them alone, and what is written through the whole.
    two.optimizers[0].load_state_dict(one.optimizers[0].state_dict())
    two.param_groups[0]["lr"] = 0.25
    assert two.optimizers[0].param_groups[0]["lr"] == 0.25
    two.state[others[0]]["momentum_buffer"] = torch.zeros(6)
    assert torch.equal(two.optimizers[0].state[others[0]]["momentum_buffer"], torch.zeros(6))
    del two.state[others[0]]
    two.state[others[1]] = {"step": torch.tensor(1.0)}
    assert [len(each.state) for each in two.optimizers] == [0, 2]
    two.state.clear()
    assert [len(each.state) for each in two.optimizers] == [0, 0]
    with pytest.raises(KeyError):
        two.state[parameters[0]]


def test_copies_stand_alone() -> None:
    one, parameters = both()
    run(one, parameters)
    two = copy.deepcopy(one)
    assert len(two.state) == 3
    two.param_groups[0]["lr"] = 0.7
    assert one.param_groups[0]["lr"] == 0.1
    assert two.optimizers[0].param_groups[0]["lr"] == 0.7


def test_groups_are_fixed() -> None:
    optimizer, _ = both()
    with pytest.raises(SpecError, match="add_param_group: each optimizer's factory makes its groups, and they stay"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_schedulers_that_cycle_momentum_ask_all_groups_for_it() -> None:
    """Cases: torch looks in `defaults` for what it may cycle; SGD has a momentum, AdamW has betas."""
    mixed, _ = both()
    assert "lr" in mixed.defaults
    assert not {"momentum", "betas"} & set(mixed.defaults)
    with pytest.raises(ValueError, match="optimizer must support momentum or beta1"):
        optim.lr_scheduler.OneCycleLR(mixed, max_lr=0.1, total_steps=10)
    alike, _ = groups_of({"*.bias": ADAMW, "*": optim.NAdam}, GPT(layers=1))
    optim.lr_scheduler.OneCycleLR(alike, max_lr=0.1, total_steps=10, base_momentum=0.8)
    assert [group["betas"][0] for group in alike.param_groups] == [0.95, 0.95]
