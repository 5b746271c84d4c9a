"""Ranks that differ or fail end with the same words, at once."""

import functools

import pytest
import torch
from torch import nn

import zplan
from zplan.runtime.comm import Comm


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def compiled(comm: Comm, *, width=8, rows=4, fail_on=None, optimizer=torch.optim.AdamW, **options) -> str:
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if fail_on in (comm.rank, -1):
            raise ValueError("my own words")
        return loss_fn(model, batch)

    try:
        zplan.compile(model, loss, torch.ones(rows, 8), optimizer=optimizer, group=comm.group, **options)
    except zplan.ZplanError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def other_stage(comm: Comm) -> str:
    return compiled(comm, stage=1 if comm.rank == 1 else 2)


def other_width(comm: Comm) -> str:
    return compiled(comm, stage=2, width=8 + 8 * (comm.rank == 2))


def other_rows(comm: Comm) -> str:
    return compiled(comm, stage=2, rows=4 + comm.rank)


def other_lr(comm: Comm) -> str:
    return compiled(comm, stage=0, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3 * (1 + comm.rank)))


def other_amsgrad(comm: Comm) -> str:
    return compiled(comm, stage=1, optimizer=functools.partial(torch.optim.AdamW, amsgrad=comm.rank == 1))


def on_meta(comm: Comm) -> str:
    model = nn.Linear(8, 1, device="meta")
    try:
        zplan.compile(model, loss_fn, torch.ones(4, 8), optimizer=torch.optim.AdamW, group=comm.group, stage=1)
    except zplan.SpecError as error:
        return str(error)
    return "fine"


def compiled_twice(comm: Comm) -> str:
    model = nn.Linear(8, 1)
    arguments = (model, loss_fn, torch.ones(4, 8))
    zplan.compile(*arguments, optimizer=torch.optim.AdamW, group=comm.group, stage=1)
    try:
        zplan.compile(*arguments, optimizer=torch.optim.AdamW, group=comm.group, stage=1)
    except zplan.SpecError as error:
        return str(error)
    return "fine"


def one_fails(comm: Comm) -> str:
    return compiled(comm, stage=2, fail_on=1)


def all_fail(comm: Comm) -> str:
    return compiled(comm, stage=2, fail_on=-1)


def all_ask_for_stage_5(comm: Comm) -> str:
    return compiled(comm, stage=5)


@pytest.mark.parametrize(
    ("function", "world", "words"),
    [
        (other_stage, 2, ["AgreementError: the ranks hold different plans", "stage=2", "stage=1", "on rank 1"]),
        (other_width, 3, ["first difference: rank 0 has parameter 0.weight: fp32[8, 8]", "rank 2 has", "[16, 8]"]),
        (other_rows, 2, ["rank 0 has batch batch: fp32[4, 8]", "rank 1 has batch batch: fp32[5, 8]"]),
        (other_lr, 2, ["the ranks hold different plans", "optimizer AdamW, group 0", "lr=0.001", "lr=0.002"]),
        (other_amsgrad, 2, ["the ranks hold different plans", "optimizer AdamW, group 0", "amsgrad"]),
        (on_meta, 2, ["weight is on meta, and compile needs real weights"]),
        (compiled_twice, 2, ["weight is on meta", "build it anew if it was compiled before"]),
        (one_fails, 3, ["AgreementError: 1 of 3 ranks failed, 2 did not", "rank 1: TraceError", "my own words"]),
        (all_fail, 2, ["TraceError", "my own words"]),
        (all_ask_for_stage_5, 2, ["SpecError: stage 5 does not exist: there are 0, 1, 2 and 3"]),
    ],
)
def test_every_rank_ends_with_the_same_words(pool, function, world, words) -> None:
    found = pool.run(world, function)
    assert len(set(found)) == 1, found
    for each in words:
        assert each in found[0]


def test_ranks_that_agree_go_on(pool) -> None:
    assert pool.run(3, compiled_at_2) == ["fine"] * 3


def compiled_at_2(comm: Comm) -> str:
    return compiled(comm, stage=2)


class FromASet(torch.nn.Module):
    """Its ops come in the order of a set of strings, which is another one in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = {"sliding": 2.0, "full": 3.0, "local": 5.0, "global": 7.0, "chunked": 11.0, "linear": 13.0}
        made = {name: x.sin() * factors[name] for name in set(factors)}
        return sum(self.linear(made[name]) for name in factors).square().mean()


def order_of_a_set(comm: Comm) -> tuple[str, list[str], float]:
    torch.manual_seed(0)
    model = FromASet()
    step = zplan.compile(
        model, lambda model, batch: model(batch), torch.ones(3, 4), optimizer=torch.optim.SGD, group=comm.group, stage=3
    )
    loss = step(torch.ones(3, 4))
    return step.plan.graph.structure, [op.literals for op in step.plan.graph.ops], loss.item()


def test_ops_may_come_in_another_order_on_another_rank(pool) -> None:
    found = pool.run(4, order_of_a_set)
    assert len({structure for structure, _, _ in found}) == 1
    assert len({loss for _, _, loss in found}) == 1
    orders = {tuple(literals) for _, literals, _ in found}
    # One in 720 to the third that four processes draw the same order of six.
    assert len(orders) > 1
