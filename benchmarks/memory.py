"""Predicted against measured peak memory per rank, for the text GPT and the odd MLP, at each stage.

    python -m benchmarks.memory [--world 2] [--json]

Each case runs on real gloo ranks: one step so that optimizer states are there, then one under torch's profiler.
"""

import argparse
import functools
import json
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import zplan
from examples import gpt_text
from tests import models
from zplan.runtime.measure import measure


def cases() -> dict[str, Any]:
    """Name -> a function that returns (model, loss_fn, batch)."""

    def gpt() -> Any:
        work = gpt_text.job()
        return work.model, work.loss_fn, next(work.batches(0, 1))

    def odd() -> Any:
        model = models.OddMLP()
        return model, model.loss_fn, model.make_batch(0)

    return {"gpt 10.8M": gpt, "odd mlp": odd}


def rank_main(rank: int, world: int, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    for name, make in cases().items():
        for stage in range(4):
            model, loss_fn, batch = make()
            optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
            step = zplan.compile(model, loss_fn, batch, optimizer=optimizer, stage=stage, bucket="8MB")
            step(batch)
            found = measure(step, batch)
            most = torch.tensor([found.resident_bytes, found.peak_bytes])
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            memory = step.plan.memory
            answers.put((rank, name, stage, memory.resident_bytes, memory.peak_bytes, *most.tolist()))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.world, os.path.join(folder, "store"), answers)
        running = mp.spawn(rank_main, arguments, nprocs=options.world, join=False)
        rows = []
        for _ in range(options.world * len(cases()) * 4):
            while answers.empty() and any(process.is_alive() for process in running.processes):
                running.join(timeout=0.1)
            rows.append(answers.get())
        running.join()
    rows = sorted({row[1:] for row in rows if row[0] == 0}, key=lambda row: (row[0], row[1]))
    keys = ("model", "stage", "resident_predicted", "resident_measured", "peak_predicted", "peak_measured", "ratio")
    table = [(n, s, rp, rm, pp, pm, round(pp / pm, 4)) for n, s, rp, pp, rm, pm in rows]
    if options.json:
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in table]))
        return
    shown = Table(title=f"bytes per rank, {options.world} gloo ranks; measured: the highest of all ranks")
    for key in keys:
        shown.add_column(key.replace("_", " "), justify="left" if key == "model" else "right")
    for row in table:
        shown.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    Console(width=120).print(shown)


if __name__ == "__main__":
    main()
