"""An image classifier with convolutions and BatchNorm on scikit-learn's digits: 1,797 scanned digits of 8 x 8 pixels.

    torchrun --standalone --nproc-per-node 2 examples/digits.py
    torchrun --standalone --nproc-per-node 2 examples/digits.py --precision bf16

trains on three quarters of them and prints how many of the others are read rightly.
"""

import argparse
import os
from collections.abc import Iterator
from functools import cache, partial
from itertools import islice

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import zplan

BATCH = 64
Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Sequential):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU())


class Digits(nn.Module):
    """[batch, 1, 8, 8] pixels from 0 to 1 -> [batch, 10] logits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = Block(1, width), Block(width, 2 * width)
        self.third = Block(2 * width, 2 * width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.second(self.first(x)), 2)
        return self.head(self.third(x).mean((2, 3)))


def loss_fn(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and how many were read rightly: what comes beside the loss is handed back as it is."""
    images, labels = batch
    logits = model(images).float()
    return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).sum()


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train on, and others to test with; the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train, test, train_labels, test_labels = (torch.as_tensor(part) for part in split)
    shaped = [(part / 16).float().view(-1, 1, 8, 8) for part in (train, test)]
    return shaped[0], train_labels.long(), shaped[1], test_labels.long()


def batches(rank: int, world: int) -> Iterator[Batch]:
    """Epoch after epoch in another order; each rank has its share. The last few of an epoch are dropped: a training
    batch keeps its shape."""
    images, labels, _, _ = digits()
    generator = torch.Generator().manual_seed(0)
    while True:
        mine = torch.randperm(len(images), generator=generator)[rank::world]
        for start in range(0, len(images) // world - BATCH + 1, BATCH):
            chosen = mine[start : start + BATCH]
            yield images[chosen], labels[chosen]


def job() -> zplan.Job:
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    return zplan.Job(Digits(), loss_fn, batches, sgd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="(default 100)")
    parser.add_argument("--stage", default="2", help="0 to 3, or auto (default 2)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="(default fp32)")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    console = Console(quiet=rank != 0)
    work = job()
    stream = batches(rank, world)
    # With bf16, BatchNorm keeps its parameters and statistics in fp32; everything else computes in bf16.
    precision = None if options.precision == "fp32" else options.precision
    with zplan.compile(
        work.model, loss_fn, next(stream), optimizer=work.optimizer, stage=options.stage, precision=precision
    ) as step:
        console.print(step.plan.summary().splitlines()[0], highlight=False, soft_wrap=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(step.optimizer, max_lr=0.1, total_steps=options.steps)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=console.quiet) as progress:
            bar = progress.add_task("", total=options.steps, loss="-")
            for batch in islice(stream, options.steps):
                loss, _ = step(batch)
                scheduler.step()
                progress.update(bar, advance=1, loss=f"{step.mean(loss).item():.3f}")
        console.print(f"{accuracy(step, rank, world):.1%} of the test images are read rightly", highlight=False)


def accuracy(step: zplan.TrainStep, rank: int, world: int) -> float:
    """Of all test images, each rank a share. The statistics of BatchNorm are each rank's own, of the batches it saw;
    `step.save` and `step.full_state_dict` take rank 0's."""
    _, _, images, labels = digits()
    _, right = step.evaluate((images[rank::world], labels[rank::world]))
    return (step.mean(right.float()) * world / len(images)).item()


if __name__ == "__main__":
    main()
