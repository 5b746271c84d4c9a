"""Collectives: the order of sums, packing, and what gloo carries."""

import functools

import pytest
import torch

from zplan.runtime.comm import Comm, mean_in_rank_order, pack


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_is_summed_in_rank_order(world: int, dtype: torch.dtype) -> None:
    torch.manual_seed(world)
    parts = torch.randn(world, 1003, dtype=dtype) * torch.logspace(-3, 3, world, dtype=dtype)[:, None]
    expected = functools.reduce(torch.add, parts.unbind(0)) / world
    assert torch.equal(mean_in_rank_order(parts.flatten(), world), expected)


def test_sum_over_a_dimension_has_another_order() -> None:
    """The reason why the mean is not `sum(0)`."""
    torch.manual_seed(0)
    parts = torch.randn(64, 1003)
    assert not torch.equal(parts.sum(0), functools.reduce(torch.add, parts.unbind(0)))


@pytest.mark.parametrize("world", [2, 5, 64])
def test_16_bit_is_summed_in_fp32_and_rounded_once(world: int) -> None:
    torch.manual_seed(world)
    parts = torch.randn(world, 515).bfloat16()
    expected = (functools.reduce(torch.add, parts.float().unbind(0)) / world).bfloat16()
    found = mean_in_rank_order(parts.flatten(), world)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_mean_leaves_what_it_was_given() -> None:
    received = torch.arange(6.0)
    mean_in_rank_order(received, 2)
    mean_in_rank_order(received, 1).zero_()
    assert torch.equal(received, torch.arange(6.0))


def test_pack_takes_any_shape_and_fills_gaps_with_zeros() -> None:
    grads = [torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0), torch.ones(0, 4), torch.ones(1).expand(3)]
    flat = pack(grads, [0, 64, 128, 192], 256, torch.float32)
    assert torch.equal(flat[:6].view(3, 2), grads[0])
    assert flat[64] == 7
    assert torch.equal(flat[192:195], torch.ones(3))
    flat[:6] = flat[64] = flat[192:195] = 0
    assert not flat.any()


def gather(comm: Comm) -> torch.Tensor:
    return comm.gather(torch.full((3,), float(comm.rank)))


def test_gather_is_in_rank_order(pool) -> None:
    for found in pool.run(3, gather):
        assert found.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def mean(comm: Comm) -> float:
    return comm.mean(torch.tensor(float(comm.rank))).item()


def test_mean_over_ranks(pool) -> None:
    assert pool.run(4, mean) == [1.5] * 4
