"""What the loopback interface counted equals `plan.traffic`."""

import functools
from pathlib import Path

import pytest
import torch

import zplan
from tests import models
from zplan.runtime.comm import Comm

STEPS, ROUNDS = 4, 5


def loopback_nbytes() -> int:
    """Bytes that this machine sent to itself: column 8 behind the interface's name, see proc_net_dev(5)."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def steps_on_the_wire(comm: Comm, stage: int) -> tuple[int, int, int, int]:
    torch.manual_seed(0)
    model = models.GPT(vocab=256, width=192, layers=4, heads=4, context=32, dropout=0.1)
    numel = sum(p.numel() for p in model.parameters())
    batch = model.make_batch(comm.rank)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    step = zplan.compile(
        model, model.loss_fn, batch, optimizer=adamw, group=comm.group, stage=stage, bucket="1MB", prefetch=2
    )
    step(batch)
    rounds = []
    for _ in range(ROUNDS):
        comm.barrier()
        before = loopback_nbytes()
        comm.barrier()
        for _ in range(STEPS):
            step(batch)
        comm.barrier()
        rounds.append(loopback_nbytes() - before)
        comm.barrier()
    # The interface is the machine's: whatever else talks on it can only add.
    return min(rounds), step.plan.traffic.bytes_per_rank, step.plan.traffic.padding_nbytes, numel


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_is_what_the_wire_carries(pool, world: int, stage: int) -> None:
    results = pool.run(world, steps_on_the_wire, stage)
    counted = results[0][0]
    _, predicted, padding, numel = results[0]
    assert counted == pytest.approx(predicted * world * STEPS, rel=0.03)
    # 2, 2, 2, 3 psi (N - 1) / N, and the padding that the plan states.
    ideal = (3 if stage == 3 else 2) * 4 * numel * (world - 1) / world
    assert predicted - padding == pytest.approx(ideal, rel=0.002)
    assert padding < 0.01 * predicted
