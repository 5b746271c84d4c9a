"""Measure: the memory of one real step on this rank, as torch's own profiler saw it."""

from dataclasses import dataclass
from typing import Any

import torch

from zplan.errors import SpecError
from zplan.graph.compat import memory_events, memory_profile
from zplan.runtime.step import TrainStep, bind


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank. `resident_bytes`: parameters, optimizer state, buffers, constants and the batch, counted on
    their storages; `peak_bytes`: these and the most that the step had allocated besides at one moment."""

    resident_bytes: int
    peak_bytes: int


def measure(step: TrainStep, *batches: Any) -> Measured:
    """Runs one step on these micro-batches under the profiler. CPU only; run a step before, so that states are there.

    Communicates as a step does: call it on every rank.
    """
    if step.plan.graph.device != "cpu":
        raise SpecError(f"measure reads CPU allocations, and this step runs on {step.plan.graph.device}")
    resident = sum(storages(step, batches[-1]).values())
    with memory_profile() as profile:
        result = step(*batches)
    del result
    now = most = 0
    for nbytes in memory_events(profile):
        now += nbytes
        most = max(most, now)
    return Measured(resident, resident + most)


def storages(step: TrainStep, batch: Any) -> dict[int, int]:
    """Storage -> bytes of all that this rank holds between steps, and of the batch."""
    tensors = [*step.residents().values(), *bind(step.trace, batch).values()]
    for state in step.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
