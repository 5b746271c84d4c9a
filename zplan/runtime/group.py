"""Group: the process group of a program that torchrun started, where its own code makes none."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from zplan.errors import SpecError

# Seconds. torch waits as long on NCCL, and three times as long on gloo, for a rank that hangs; a rank that has ended is
# told at once.
TIMEOUT = 600.0


def make_group(device: str, *, timeout: float | None = None) -> None:
    """Makes the default process group of the ranks that torchrun started: NCCL for CUDA, gloo otherwise.

    `timeout`: seconds after which a rank that waits for others gives up.

    torchrun keeps one store over restarts (seen on torch 2.13), where ranks then find the addresses of those that were
    killed: of ten restarts of a gloo program about three hung until the timeout. Here each restart has keys of its own.
    """
    if timeout is not None and not timeout > 0:
        raise SpecError(f"timeout {timeout!r} is no time: give seconds above zero")
    wait = timedelta(seconds=TIMEOUT if timeout is None else timeout)
    store, rank, world = next(rendezvous("env://", timeout=wait))
    # torchrun's own; there is no function that tells it.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    cuda = device == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=PrefixStore(f"zplan/restart {restart}", store),
        rank=rank,
        world_size=world,
        timeout=wait,
        device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
    )
