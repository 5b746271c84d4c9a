"""A causal language model of transformers, as it is, trained on text within a memory budget, and handed back to it.

    torchrun --standalone --nproc-per-node 2 examples/causal_lm.py --memory 34MB --export runs/lm

plans the lowest stage that fits, prints the plan, trains a small Llama on bytes of CPython's help, and writes a folder
that `AutoModelForCausalLM.from_pretrained` reads. `--model-config DIR` takes any config.json of a causal model.
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from gpt_text import text, windows
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

import zplan

Batch = dict[str, torch.Tensor]
ADAMW = partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1)


def small() -> PretrainedConfig:
    """A Llama over bytes."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=256, **sizes, num_key_value_heads=2, max_position_embeddings=64, use_cache=False)


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def batches(rank: int, world: int) -> Iterator[Batch]:
    for tokens, _ in windows(text().long(), seed=1000 + rank):
        # transformers shifts labels itself.
        yield {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def job(config: PretrainedConfig | None = None) -> zplan.Job:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small() if config is None else config)
    return zplan.Job(model.train(), loss_fn, batches, ADAMW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="(default 100)")
    parser.add_argument("--stage", default="auto", help="0 to 3, or auto, the lowest that fits --memory (default auto)")
    parser.add_argument("--memory", help="bytes that a rank may hold, such as 34MB; on a CPU no budget by default")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="(default fp32)")
    parser.add_argument("--model-config", type=Path, metavar="DIR", help="a folder with config.json")
    parser.add_argument("--plan-only", action="store_true", help="print the plan and its schedule, and stop")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the trained model for transformers")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    console = Console(quiet=rank != 0)
    config = small() if options.model_config is None else AutoConfig.from_pretrained(options.model_config)
    work = job(config)
    stream = work.batches(rank, world)
    asked: dict[str, Any] = {"stage": options.stage, "memory": options.memory}
    asked["precision"] = None if options.precision == "fp32" else options.precision
    if options.plan_only:
        plan = zplan.plan(work.model, loss_fn, next(stream), optimizer=ADAMW, world_size=world, **asked)
        console.print(f"{plan}\n\n{plan.schedule}", highlight=False, markup=False, soft_wrap=True)
        return
    with zplan.compile(work.model, loss_fn, next(stream), optimizer=ADAMW, **asked) as step:
        console.print(str(step.plan), highlight=False, markup=False, soft_wrap=True)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=console.quiet) as progress:
            bar = progress.add_task("", total=options.steps, loss="-")
            for batch in islice(stream, options.steps):
                progress.update(bar, advance=1, loss=f"{step.mean(step(batch)).item():.3f}")
        if options.export is not None:
            hand_back(step, config, options.export, next(stream), rank, console)


def hand_back(
    step: zplan.TrainStep, config: PretrainedConfig, folder: Path, batch: Batch, rank: int, console: Console
) -> None:
    """A save, which each rank writes its share of; one rank makes safetensors of it, as `zplan export` would."""
    loss = step.evaluate(batch)
    saved = folder.with_name(f"{folder.name}.save")
    step.save(saved)
    if rank == 0:
        config.save_pretrained(saved / "config")
        zplan.export(saved, folder, config=saved / "config")
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            again = model(**batch).loss
        console.print(f"{folder}: loss {again.item():.6f}, and {loss.item():.6f} in training", highlight=False)


if __name__ == "__main__":
    main()
