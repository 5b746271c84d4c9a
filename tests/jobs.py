"""Jobs for the command line: one that trains at once, and ones that are wrong."""

import functools
import os
from collections.abc import Iterator
from itertools import islice

import torch
from torch import nn

import zplan


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def broken_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return model(batch[0]).sum() * batch[1].mean().item()


def batches(rank: int, world: int) -> Iterator[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(20):
        x = torch.randn(64, 8, generator=generator)
        yield [x, x.sum(1, keepdim=True)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def tiny() -> zplan.Job:
    return zplan.Job(model(), loss_fn, batches, functools.partial(torch.optim.AdamW, lr=1e-2))


def item() -> zplan.Job:
    return zplan.Job(model(), broken_loss, batches, torch.optim.AdamW)


def raises() -> zplan.Job:
    raise RuntimeError("the data set is not there")


def unready() -> int:
    return 3


def no_batches() -> zplan.Job:
    return zplan.Job(model(), loss_fn, [], torch.optim.AdamW)


def no_optimizer() -> zplan.Job:
    return zplan.Job(model(), loss_fn, batches)


def differs() -> zplan.Job:
    """Another model on each rank."""
    width = 16 + 16 * int(os.environ["RANK"])
    return zplan.Job(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 1)), loss_fn, batches, torch.optim.AdamW)


def uneven() -> zplan.Job:
    """Rank 1 has fewer batches."""
    return zplan.Job(model(), loss_fn, lambda rank, world: islice(batches(rank, world), 9 - 4 * rank), torch.optim.SGD)


def other_shape() -> zplan.Job:
    """The third batch of rank 1 has another shape."""

    def stream(rank: int, world: int) -> Iterator[list[torch.Tensor]]:
        for i, (x, y) in enumerate(batches(rank, world)):
            yield [x[:3], y[:3]] if (i, rank) == (2, 1) else [x, y]

    return zplan.Job(model(), loss_fn, stream, torch.optim.SGD)
