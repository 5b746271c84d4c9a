"""A run that saves itself after each step and goes on from there, and that may be killed or stopped: test_faults.py.

torchrun --nproc-per-node 2 --max-restarts 5 fault_job.py SAVES RESULT --steps 20 --kills 3
"""

import argparse
import json
import os
import random
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import zplan
from tests.ranks.training import CASES, build

STEPS = 20


def seeds(step: int, rank: int) -> list[int]:
    return [100 * step + 10 * rank + i for i in range(2)]


def go(
    saves: Path | None, steps: int, *, stage: int, timeout: float | None = None, group=None, hang: int | None = None
):
    """Trains to step `steps`, dropout, schedule and all, from the last save where there is one; returns the weights."""
    case = CASES["gpt"]
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    step = zplan.compile(
        build(case), case.loss_fn, case.batch(0), optimizer=case.optimizer, group=group, stage=stage, bucket=8_000,
        clip=1.0, micro_batches=2, timeout=timeout,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, T_max=steps)
    torch.manual_seed(100 + rank)
    at = 0
    if saves is not None and (saves / "zplan.json").exists():
        at = step.load(saves, scheduler=scheduler)["next"]
    for i in range(at, steps):
        if i == hang and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        step(*(case.batch(seed) for seed in seeds(i, rank)))
        scheduler.step()
        if saves is not None:
            step.save(saves, scheduler=scheduler, extra={"next": i + 1}, blocking=i % 2 == 0)
    weights = step.full_state_dict()
    step.close()
    return weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("saves", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--kills", type=int, default=0, help="attempts that are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=0.6, help="seconds of training in which a kill comes")
    parser.add_argument("--timeout", type=float, default=30)
    parser.add_argument("--hang", type=int, help="the step in which rank 1 stops")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    draws = random.Random(f"{options.seed} {attempt}")
    victim, delay = draws.randrange(int(os.environ["WORLD_SIZE"])), draws.uniform(0, options.within)
    begun = threading.Event()
    if attempt < options.kills and rank == victim:
        threading.Thread(target=kill, args=(begun, delay), daemon=True).start()
    if rank == 0:
        print(json.dumps({"attempt": attempt, "victim": victim, "delay": delay}), flush=True)
    told = zplan.TrainStep.__call__

    def call(step, *batches):
        begun.set()
        return told(step, *batches)

    zplan.TrainStep.__call__ = call
    weights = go(options.saves, options.steps, stage=options.stage, timeout=options.timeout, hang=options.hang)
    if rank == 0:
        save_file({name: tensor.clone() for name, tensor in weights.items()}, options.result)


def kill(begun: threading.Event, delay: float) -> None:
    """In the middle of whatever the process does then."""
    begun.wait()
    threading.Event().wait(delay)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
