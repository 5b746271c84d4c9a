"""A training run that can be stopped at any time: micro-batches, bf16, clipping, a schedule, evaluation, saves.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --save runs/gpt

trains the byte-level GPT of gpt_text.py and saves now and then. Started again with the same words, it goes on from the
last save, bit for bit as if it had never stopped, also with another --stage, or on another number of ranks (then each
rank draws other text). Try it:

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --save runs/gpt --stop-after 60
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --save runs/gpt --stage 2
"""

import argparse
import math
import os
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt_text import CONTEXT, GPT, text, windows
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import zplan

Batch = tuple[torch.Tensor, torch.Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, targets = batch
    # With --precision bf16 the logits are bf16: the loss is taken in fp32.
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves biases and norms alone: zplan asks with true shapes, so `ndim` works."""
    every = [parameter for _, parameter in parameters]
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def halves() -> tuple[torch.Tensor, torch.Tensor]:
    """The text to train on, and the last tenth, which is held out."""
    data = text().long()
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def batches(rank: int, world: int) -> Iterator[Batch]:
    return windows(halves()[0], seed=1000 + rank)


def job(width: int = 128, layers: int = 4) -> zplan.Job:
    torch.manual_seed(0)
    model = GPT(width, layers, max(1, width // 32), CONTEXT)
    return zplan.Job(model, loss_fn, batches, make_optimizer)


def rate(at: int, *, warmup: int, steps: int) -> float:
    """What the learning rate is multiplied by: up in a line, then down a half cosine to a tenth."""
    if at < warmup:
        return (at + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (at - warmup) / max(1, steps - warmup))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of the whole run (default 200)")
    parser.add_argument("--stop-after", type=int, help="leave after this step, as if time were up; saves first")
    parser.add_argument("--stage", default="auto", help="0 to 3, or auto, the lowest that fits --memory (default auto)")
    parser.add_argument("--memory", help="bytes that a rank may hold, such as 20MB; on a CPU no budget by default")
    parser.add_argument("--micro-batches", type=int, default=4, help="batches of one optimizer step (default 4)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16", help="(default bf16)")
    parser.add_argument("--save", type=Path, help="save into this folder, and go on from what it holds")
    parser.add_argument("--save-every", type=int, default=50, help="steps from one save to the next (default 50)")
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps between evaluations (default 50)")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32 (default 128)")
    parser.add_argument("--layers", type=int, default=4, help="(default 4)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    # torchrun tells each process its number; zplan makes the process group when the step is compiled.
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    console = Console(quiet=rank != 0)
    work = job(options.width, options.layers)
    stream = work.batches(rank, world)
    held_out = list(islice(windows(halves()[1], seed=2000 + rank), 4))

    with console.status("") as status:
        step = zplan.compile(
            work.model,
            loss_fn,
            held_out[0],
            optimizer=work.optimizer,
            stage=options.stage,
            memory=options.memory,
            micro_batches=options.micro_batches,
            precision=None if options.precision == "fp32" else options.precision,
            clip=1.0,
            progress=lambda phase, count=0: status.update(f"{phase} {count or ''}"),
        )
    console.print(step.plan.summary().splitlines()[0], highlight=False, soft_wrap=True)
    schedule = partial(rate, warmup=max(1, options.steps // 10), steps=options.steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(step.optimizer, schedule)
    # Dropout: each rank draws its own. A load puts the random state of every rank back to where it was.
    torch.manual_seed(100 + rank)

    with step:
        if options.save is not None and (options.save / "zplan.json").exists():
            extra = step.load(options.save, scheduler=scheduler)
            # The next batch is the first that was not trained on. A loader with a state of its own would be set here.
            stream = islice(stream, extra["batches"], None)
            console.print(f"going on after step {step.steps} of {options.save}", highlight=False)
        train(step, scheduler, stream, held_out, options, console)


def train(
    step: zplan.TrainStep,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    stream: Iterator[Batch],
    held_out: list[Batch],
    options: argparse.Namespace,
    console: Console,
) -> None:
    last = min(options.steps, options.stop_after or options.steps)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=console.quiet) as progress:
        bar = progress.add_task("", total=options.steps, completed=step.steps, facts="")
        while step.steps < last:
            # Gradients are averaged over the micro-batches, so the loss is not divided by their number.
            loss = step.mean(step(*islice(stream, options.micro_batches))).item()
            facts = f"loss {loss:.3f}, norm {step.grad_norm.item():.2f}, rate {scheduler.get_last_lr()[0]:.1e}"
            scheduler.step()
            progress.update(bar, completed=step.steps, facts=facts)
            if step.steps % options.evaluate_every == 0 or step.steps == options.steps:
                mean = step.mean(torch.stack([step.evaluate(batch) for batch in held_out]).mean()).item()
                progress.console.print(f"step {step.steps}: {facts}, held out {mean:.3f}", highlight=False)
            if options.save is not None and (step.steps % options.save_every == 0 or step.steps == last):
                # Training goes on while it is written; the next save, or the end, waits for it. Until it is whole, the
                # folder holds the save before.
                extra = {"batches": step.steps * options.micro_batches}
                step.save(options.save, scheduler=scheduler, extra=extra, blocking=False)


if __name__ == "__main__":
    main()
