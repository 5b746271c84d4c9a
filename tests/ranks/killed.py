"""Saves that are killed, each in processes of their own: `python -m tests.ranks.killed FOLDER WORLD MODE`.

The parent has torch loaded, saves once, forks the ranks of each save after it, and loads what they leave. MODE is
`phases`, where a rank kills itself at one phase of a save after the other, or how many saves are killed at random
moments.
"""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import zplan
from tests.ranks.saves import batch, exact
from zplan.runtime.comm import Comm
from zplan.runtime.store import MANIFEST

OLD, NEW = "old", "new"
# (phase, how many of it came before): where a rank of several kills itself.
MOMENTS = [("clean", 0), ("write", 0), ("write", 7), ("commit", 0), ("remove", 0)]


class Killer:
    """Called at each phase of a save; kills this process at one of them, counted from 0 within `phase` ("": of all)."""

    def __init__(self, phase: str, at: int) -> None:
        self.phase, self.at, self.seen = phase, at, 0

    def __call__(self, phase: str, _: int) -> None:
        if self.phase in ("", phase):
            if self.seen == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen += 1


def save(rank: int, world: int, folder: Path, step: zplan.TrainStep, killer: Killer, blocking: bool) -> None:
    """On one rank. `step`: the parent's own, two steps old, which a world of one goes on with."""
    if world > 1:
        store = dist.FileStore(f"{folder}.store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        step = exact(Comm(dist.group.WORLD), 2)
        step.load(folder)
    step(batch(2))
    saving = step.save(folder, extra=NEW, progress=killer, blocking=blocking)
    if saving is not None:
        saving.wait()


def fork(world: int, folder: Path, step: zplan.TrainStep, victim: int, killer: Killer, blocking: bool) -> list[int]:
    Path(f"{folder}.store").unlink(missing_ok=True)
    found = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                save(rank, world, folder, step, killer if rank == victim else Killer("", -1), blocking)
                code = 0
            finally:
                os._exit(code)
        found.append(pid)
    return found


def end(pids: list[int], victim: int) -> bool:
    """Waits for the victim, then kills the others; whether the victim was killed before it was done."""
    _, status = os.waitpid(pids[victim], 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0, status
    for pid in pids:
        if pid != pids[victim]:
            if killed:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return killed


def look(step: zplan.TrainStep, folder: Path) -> str:
    """Loads what is there, and looks whether it is wholly the old or the new one."""
    extra = step.load(folder)
    assert step.steps == {OLD: 2, NEW: 3}[extra]
    assert int(step.full_state_dict()["calls"]) == step.steps
    return extra


def put_back(step: zplan.TrainStep, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(f"{folder}.old", folder)
    assert look(step, folder) == OLD


def phases(world: int, folder: Path, step: zplan.TrainStep) -> None:
    for blocking in (True, False):
        for victim in range(world):
            seen = []
            moments = (
                [("", at) for at in range(1000)] if world == 1 else MOMENTS[1 if victim else 0 : 3 if victim else 5]
            )
            for phase, at in moments:
                killed = end(fork(world, folder, step, victim, Killer(phase, at), blocking), victim)
                seen.append(look(step, folder))
                if seen[-1] == NEW:
                    put_back(step, folder)
                if not killed:
                    break
            assert seen[0] == OLD
            assert victim or seen[-1] == NEW
            print(f"victim {victim}, blocking {blocking}: {' '.join(seen)}")


def at_random(times: int, world: int, folder: Path, step: zplan.TrainStep) -> None:
    for seed in range(times):
        seconds = random.Random(seed).uniform(0.0, 0.05)
        pids = fork(world, folder, step, 0, Killer("", -1), seed % 2 == 0)
        old = {each.name for each in folder.iterdir()}
        while {each.name for each in folder.iterdir()} <= old:  # the save has not begun
            time.sleep(0.0005)
        time.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        found = look(step, folder)
        print(f"seed {seed}: killed {seconds * 1000:.0f} ms into the save: {found}", flush=True)
        if found == NEW:
            put_back(step, folder)


def main(folder: Path, world: int, mode: str) -> None:
    torch.set_num_threads(1)
    step = exact(Comm(None), 0)
    for i in range(2):
        step(batch(i))
    step.save(folder, extra=OLD)
    shutil.copytree(folder, f"{folder}.old")
    if mode == "phases":
        phases(world, folder, step)
    else:
        at_random(int(mode), world, folder, step)
    # Whatever was left behind is gone after the next save.
    assert not end(fork(world, folder, step, 0, Killer("", -1), True), 0)
    assert look(step, folder) == NEW
    assert sorted(each.name[:5] for each in folder.iterdir()) == ["data-", MANIFEST[:5]], list(folder.iterdir())
    print("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
