"""A byte-level GPT of about 10 M parameters, trained on the English documentation text that ships with CPython.

    torchrun --standalone --nproc-per-node 2 examples/gpt_text.py

prints the plan at every stage, trains on two ranks, writes a line of text, and shows that stages 0 to 3 give the same
weights bit for bit. `job` is what the command line plans and runs:

    zplan schedule examples/gpt_text.py:job --world 2 --stage 3
    torchrun --standalone --nproc-per-node 2 -m zplan run examples/gpt_text.py:job --stage 2 --steps 50
"""

import argparse
import functools
import pydoc_data.topics
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import zplan

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 384, 6, 6, 64, 8


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out: [batch, length] -> [batch, length, 256]."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.wte.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def text() -> torch.Tensor:
    """CPython's help topics, as bytes."""
    pages = (pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor(list("\n".join(pages).encode()), dtype=torch.uint8)


def windows(data: torch.Tensor, *, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end of random windows, and the same one byte further on: twice [BATCH, CONTEXT]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
        batch = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
        yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def batches(rank: int, world: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of the text; every rank draws its own."""
    return windows(text().long(), seed=1000 + rank)


def job() -> zplan.Job:
    torch.manual_seed(0)
    model = GPT(WIDTH, LAYERS, HEADS, CONTEXT)
    return zplan.Job(model, loss_fn, batches, functools.partial(torch.optim.AdamW, lr=6e-4, betas=(0.9, 0.95)))


def show_plans(console: Console, *, world: int) -> None:
    """Plan and schedule at each stage, then memory and traffic side by side."""
    plans = []
    for stage in range(4):
        work = job()
        batch = next(work.batches(0, world))
        plan = zplan.plan(
            work.model, loss_fn, batch, optimizer=work.optimizer, stage=stage, world_size=world, bucket="8MB"
        )
        console.rule(f"stage {stage}: {zplan.STAGES[stage].sent} per rank and step")
        print(plan)
        print()
        print(plan.schedule)
        plans.append(plan)
    console.rule("side by side")
    print(zplan.compare(plans))


def train(console: Console, *, steps: int, stage: int) -> tuple[list[float], str]:
    """Trains on all ranks; returns the losses, averaged over ranks, and a line that the model wrote."""
    rank, world = dist.get_rank(), dist.get_world_size()
    work = job()
    stream = work.batches(rank, world)
    torch.manual_seed(100 + rank)
    losses = []
    with zplan.compile(work.model, loss_fn, next(stream), optimizer=work.optimizer, stage=stage, bucket="8MB") as step:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=rank != 0) as progress:
            bar = progress.add_task("", total=steps, loss="-")
            for _ in range(steps):
                losses.append(step.mean(step(next(stream))).item())
                progress.update(bar, advance=1, loss=f"{losses[-1]:.3f}")
        with step.whole_parameters() as model:
            line = write(model, prompt="The following ", length=80)
    return losses, line


@torch.no_grad()
def write(model: nn.Module, *, prompt: str, length: int) -> str:
    """Draws bytes from the model until a line is full."""
    model.eval()
    generator = torch.Generator().manual_seed(7)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = model(tokens[:, -CONTEXT:])[0, -1] / 0.7
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, token[None]], 1)
    model.train()
    return bytes(tokens[0].tolist()).decode(errors="replace").replace("\n", " ")


def weights_after(*, stage: int, steps: int) -> dict[str, torch.Tensor]:
    """The whole model after some steps at a stage, from the same start, on the same data."""
    rank, world = dist.get_rank(), dist.get_world_size()
    work = job()
    stream = work.batches(rank, world)
    with zplan.compile(work.model, loss_fn, next(stream), optimizer=work.optimizer, stage=stage, bucket="8MB") as step:
        torch.manual_seed(200 + rank)
        for _ in range(steps):
            step(next(stream))
        return step.full_state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=220, help="training steps (default 220)")
    parser.add_argument("--stage", type=int, default=3, help="stage to train at (default 3)")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0, width=100)
    if dist.get_rank() == 0:
        show_plans(console, world=dist.get_world_size())
    console.rule(f"training at stage {options.stage} on {dist.get_world_size()} ranks")
    losses, line = train(console, steps=options.steps, stage=options.stage)
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    console.print(f"it writes: {line!r}", markup=False)
    if losses[-1] > 0.7 * losses[0]:
        raise SystemExit("the loss has not clearly fallen")
    console.rule("stages 0 to 3 from the same start, 4 steps each")
    first = weights_after(stage=0, steps=4)
    for stage in (1, 2, 3):
        other = weights_after(stage=stage, steps=4)
        if not all(torch.equal(first[name], other[name]) for name in first):
            raise SystemExit(f"stage {stage} differs from stage 0")
        console.print(f"stage {stage} equals stage 0 in all {len(first)} tensors, bit for bit")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
