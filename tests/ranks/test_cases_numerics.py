"""Numbers that came out wrong in other systems: each test carries the id of the public report it comes from."""

import pytest
import torch
from torch import nn

import zplan
from tests.ranks.training import CASES, Case, Run, assert_same, build, odd, odd_batch, odd_loss, sharded, unsharded
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
