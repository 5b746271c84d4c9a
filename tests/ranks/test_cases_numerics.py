"""Numbers that came out wrong in other systems: each test carries the id of the public report it comes from."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zplan
from tests.ranks.training import CASES, Case, Run, assert_same, build, odd, odd_batch, odd_loss, sharded, unsharded
from zplan.planner.memory import Memory
from zplan.runtime.comm import Comm


def every_overlap(comm: Comm, stage: int) -> list[Run]:
    """From one tensor a bucket to all in one, and from no overlap to all that the passes give."""
    ways = [(bucket, overlap) for bucket in (1, "25MB") for overlap in ((0, 1), (8, 8))]
    return [
        sharded(comm, CASES["odd"], {"stage": stage, "bucket": bucket, "prefetch": prefetch, "depth": depth})
        for bucket, (prefetch, depth) in ways
    ]


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_deepspeed_5545_overlap_with_very_small_buckets_changes_nothing(pool, stage) -> None:
    world = 3
    expected = unsharded(CASES["odd"], world)
    for rank, runs in enumerate(pool.run(world, every_overlap, stage)):
        for run in runs:
            assert_same(run, expected[rank])


def in_groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Four groups, in an order that is not that of the model: biases without decay, and parameters of their own."""
    of = {}
    for name, parameter in named:
        group = "one" if name == "one" else "twice" if name.startswith("twice") else name.rpartition(".")[2]
        of.setdefault(group, []).append(parameter)
    options = {
        "twice": {"lr": 0.05, "weight_decay": 0.3},
        "bias": {"lr": 0.001, "weight_decay": 0.0},
        "one": {"lr": 0.2, "weight_decay": 0.0},
        "weight": {"lr": 0.01, "weight_decay": 0.1},
        "scale": {"lr": 0.02, "weight_decay": 0.4, "betas": (0.5, 0.9)},
        "unused": {"lr": 1.0, "weight_decay": 1.0},
    }
    return torch.optim.AdamW([{"params": of[group], **options[group]} for group in options], foreach=False)


GROUPS = Case(odd, odd_loss, odd_batch, in_groups)


def at_every_stage(comm: Comm, options: dict) -> list[Run]:
    return [sharded(comm, GROUPS, {"stage": stage, **options}) for stage in range(4)]


def group_of_every_slice(comm: Comm, stage: int) -> list[tuple[int, float, float, int]]:
    """(group, lr, weight decay, elements) of a rank's optimizer."""
    step = zplan.compile(
        build(GROUPS), GROUPS.loss_fn, GROUPS.batch(0), optimizer=in_groups, group=comm.group, stage=stage
    )
    groups = step.optimizer.param_groups
    return [(i, g["lr"], g["weight_decay"], sum(p.numel() for p in g["params"])) for i, g in enumerate(groups)]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("bucket", [200, "25MB"])
def test_deepspeed_6873_groups_keep_their_own_lr_and_weight_decay(pool, world, bucket) -> None:
    expected = unsharded(GROUPS, world)
    for rank, runs in enumerate(pool.run(world, at_every_stage, {"bucket": bucket})):
        for run in runs:
            assert_same(run, expected[rank])


def test_deepspeed_6873_every_rank_s_optimizer_has_all_groups_in_order(pool) -> None:
    plan = zplan.plan(build(GROUPS), GROUPS.loss_fn, GROUPS.batch(0), optimizer=in_groups, stage=2, world_size=3)
    trained = [sum(t.numel for t in plan.graph.tensors if t.grad is not None and t.group == i) for i in range(6)]
    for stage in (0, 2):
        found = pool.run(3, group_of_every_slice, stage)
        options = {tuple(each[:3] for each in rank) for rank in found}
        assert options == {
            ((0, 0.05, 0.3), (1, 0.001, 0.0), (2, 0.2, 0.0), (3, 0.01, 0.1), (4, 0.02, 0.4), (5, 1.0, 1.0))
        }
        for i, numel in enumerate(trained):
            # Padding goes with the tensor before it.
            assert sum(rank[i][3] for rank in found) >= numel
            assert all(rank[i][3] == 0 for rank in found) == (numel == 0)
    assert [plan.graph.tensor[name].group for name in ("twice.weight", "first.bias", "one", "low.weight")] == [
        0,
        1,
        2,
        3,
    ]


class Checkpointed(nn.Module):
    """Dropout inside blocks; `regions`: these are handed to `torch.utils.checkpoint`."""

    def __init__(self, regions: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU()) for _ in range(3))
        self.regions = regions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.regions else block(x)
        return x.square().mean()


def checkpointed_batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def called(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


@pytest.mark.parametrize("stage", [0, 3])
def test_olmo_core_828_dropout_with_checkpointing_on_and_off(pool, stage: int) -> None:
    on, off = (Case(partial(Checkpointed, regions), called, checkpointed_batch) for regions in (True, False))
    options = {"stage": stage, "bucket": 200}
    for run, plain in zip(pool.run(2, sharded, on, options), pool.run(2, sharded, off, options), strict=True):
        assert_same(run, plain)


class Slope(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


SMALL, MANY = 2.0**-9, 255


def summed(comm: Comm, stage: int) -> tuple[torch.Tensor, list[int], str]:
    """What SGD subtracts, over all micro-batches; bytes an element of the accumulator; and the printed schedule."""
    step = zplan.compile(
        Slope(), called, torch.ones(64), optimizer=partial(torch.optim.SGD, lr=1.0), group=comm.group, stage=stage,
        precision="bf16", micro_batches=MANY + 1,
    )  # fmt: skip
    step(torch.ones(64), *(torch.full((64,), SMALL) for _ in range(MANY)))
    middle = step.plan.programs[1]
    sums = [alive.nbytes for alive in Memory(middle).alive if alive.storage == "b0:acc"]
    elements = middle.bucket("b0").numel if stage < 2 else middle.bucket("b0").part
    weight = step.full_state_dict()["weight"]
    return -weight * (MANY + 1), [nbytes // elements for nbytes in sums], str(step.plan.schedule)


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_1800_many_small_micro_gradients_in_bf16(pool, stage: int) -> None:
    """Added to 1 in bf16, each of them is lost: 1 + 2^-9 is 1 there. The sum of all is 1.498."""
    assert torch.tensor(1.0).bfloat16() + torch.tensor(SMALL).bfloat16() == 1
    exact = 1 + MANY * SMALL
    # Stages 0 and 1 round the sum once, to what travels.
    expected = exact if stage >= 2 else torch.tensor(exact).bfloat16().item()
    for total, itemsize, schedule in pool.run(2, summed, stage):
        assert torch.equal(total, torch.full((64,), expected))
        assert itemsize == [4], "the accumulator is fp32"
        assert "accumulate" in schedule


def test_moonlight_27_deepspeed_7807_muon_is_refused_until_matrices_are_whole() -> None:
    case = CASES["plain"]
    words = "Muon is not known to work element by element, and each rank owns slices of parameters"
    for factory in (by_muon, {"*.weight": by_muon, "*": torch.optim.AdamW}):
        with pytest.raises(zplan.SpecError, match=words):
            zplan.plan(build(case), case.loss_fn, case.batch(0), optimizer=factory, stage=2, world_size=2)


def by_muon(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for _, p in named if p.ndim == 2])
