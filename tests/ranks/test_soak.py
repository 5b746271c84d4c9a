"""A long run holds what it held after a few steps: memory, open files, threads and tensors do not grow."""

import functools
import gc
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import zplan
from tests.ranks.training import CASES, build, seed
from zplan.runtime.comm import RETIRED, Comm

SGD = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Held:
    """What this process holds after a step, with garbage collected."""

    step: int
    resident_bytes: int
    files: int
    threads: int
    tensors: int

    @staticmethod
    def now(step: int) -> "Held":
        gc.collect()
        return Held(
            step,
            int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            # Not isinstance: it asks objects for their class, and some answer with more than that.
            sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
        )


def soak(comm: Comm, steps: int, stage: int, every: int) -> list[Held]:
    """Steps of two micro-batches, clipped and scheduled, and now and then all else that is done with a step."""
    case = CASES["gpt mixed"]
    step = zplan.compile(
        build(case),
        case.loss_fn,
        case.batch(0),
        optimizer=SGD,
        group=comm.group,
        stage=stage,
        bucket=16_000,
        micro_batches=2,
        clip=1.0,
        skip_nonfinite=True,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(step.optimizer, 100)
    # Emptied tensors are kept, as many as this: a long run has them all.
    for _ in range(RETIRED):
        step._comm.retire(torch.empty(1))
    held = []
    for i in range(steps):
        one, two = case.batch(seed(i, comm.rank)), case.batch(seed(i, comm.rank + 100))
        if i % 2:
            step(one, two)
        else:
            step.accumulate(one)
            step(two)
        scheduler.step()
        if i % every == 0:
            step.evaluate(one)
            step.evaluate({name: value[:1] for name, value in one.items()})
            step.mean(step.grad_norm)
            step.full_state_dict()
            with step.whole_parameters() as model:
                model.state_dict()
            held.append(Held.now(i))
    assert step.grad_norm.isfinite()
    step.close()
    return held


# What glibc's allocator and torch's own caches may move about; a leak of one tensor of 1 KiB a step would be 1 MB in a
# thousand, and shows in the number of tensors.
NOISE = 4 << 20


def assert_flat(held: list[Held], warm: int) -> None:
    first, *rest = [each for each in held if each.step >= warm]
    assert len(rest) > 3
    for each in rest:
        assert (each.files, each.threads, each.tensors) == (first.files, first.threads, first.tensors), (first, each)
    # By the middle of each half, so that neither the first nor the last moment decides.
    half = len(rest) // 2
    early, late = sorted(x.resident_bytes for x in rest[:half]), sorted(x.resident_bytes for x in rest[half:])
    assert late[len(late) // 2] - early[len(early) // 2] <= NOISE, [each.resident_bytes for each in held]


def test_a_hundred_steps_hold_what_thirty_held(pool) -> None:
    for held in pool.run(2, soak, 100, 3, 15):
        assert_flat(held, 25)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_thousand_steps_on_four_ranks_hold_what_two_hundred_held(pool, stage: int) -> None:
    for held in pool.run(4, soak, 1000, stage, 20, within=1500):
        print([each.resident_bytes >> 10 for each in held], held[-1])
        assert_flat(held, 200)
