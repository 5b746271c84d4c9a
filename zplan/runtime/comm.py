"""Comm: the collectives of one process group, as nodes of a graph and as calls.

On gloo both are made of an all-to-all. A reduce-scatter is one of the local gradients and a sum in rank order: half the
bytes and half the time of gloo's own, and the same bits whatever the bucket. An all-gather is one of the repeated part:
gloo's own fills a buffer of the same size behind the scenes, from a moment to a moment that nobody can plan. NCCL uses
its own.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from zplan.graph.compat import functional_collectives

# How many emptied tensors are kept. A step retires a few dozen; what falls out was done with many steps ago.
RETIRED = 4096

# Seconds. Chosen, not derived: with it none of 60 runs aborted (see `Comm.leave`). A thread kept off the cores for
# longer still could.
LET_GO = 0.1


@dataclass(frozen=True)
class Comm:
    """A process group, or None in a world of one.

    `retired` keeps tensors that a collective has read or written, emptied of their memory. gloo's thread lets go of a
    tensor some time after its wait; when it is the last to do so, while Python drops its own reference, torch (2.13)
    corrupts its heap: one of three runs of 4,000 small collectives on 4 ranks died of it, none when Python held on.
    """

    group: dist.ProcessGroup | None
    retired: deque[Any] = field(default_factory=lambda: deque(maxlen=RETIRED), compare=False, repr=False)

    @property
    def world(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def name(self) -> str:
        return "" if self.group is None else self.group.group_name

    def retire(self, *tensors: torch.Tensor) -> None:
        """Frees the memory of tensors that nobody reads any more, at once, and keeps the tensors themselves."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storage.resize_(0)
            self.retired.append((tensor, storage))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Makes `tensor` on every rank that of the group's first rank."""
        if self.group is not None:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """part: [n] on each rank -> [world * n]."""
        if self.group is None:
            return part
        repeated = part.repeat(self.world)
        splits = [part.numel()] * self.world
        out = functional_collectives.all_to_all_single(repeated, splits, splits, self.name)
        whole: torch.Tensor = functional_collectives.wait_tensor(out)
        self.retire(repeated)
        return whole

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """value: the same shape on each rank -> its mean over ranks, summed in rank order."""
        gathered = self.gather(value.detach().reshape(-1))
        mean = mean_in_rank_order(gathered, self.world).view(value.shape)
        if self.group is not None:
            self.retire(gathered)
        return mean

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """value: the same shape on each rank -> its sum over ranks, in rank order."""
        gathered = self.gather(value.detach().reshape(-1))
        total = sum_in_rank_order(gathered, self.world).view(value.shape)
        if self.group is not None:
            self.retire(gathered)
        return total

    def exchange(self, item: Any) -> list[Any]:
        """A small Python object of each rank, in rank order; pickled by torch between these ranks only."""
        if self.group is None:
            return [item]
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item, group=self.group)
        return items

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def leave(self) -> None:
        """Waits for every rank, and for gloo's threads to let go of the last tensors.

        To let go they need Python's lock. One that is still waiting for it when the interpreter ends is unwound through
        C++ that forbids it, and the process aborts (torch 2.13, Python 3.11): 5 of 60 runs of a short program on two
        busy cores did. There is nothing to join: destroying the group leaves its threads running. A sleep hands the
        lock over.
        """
        self.barrier()
        if self.group is not None:
            time.sleep(LET_GO)


Emit = Callable[..., Any]


def start_gather(emit: Emit, comm: Comm, part: Any) -> Any:
    return emit(functional_collectives.all_gather_into_tensor.default, (part, comm.world, comm.name))


def start_exchange(emit: Emit, comm: Comm, flat: Any, part: int) -> Any:
    """flat: [world * part]; part r goes to rank r -> the same part from each rank, in rank order."""
    splits = [part] * comm.world
    return emit(functional_collectives.all_to_all_single.default, (flat, splits, splits, comm.name))


def start_reduce_scatter(emit: Emit, comm: Comm, flat: Any) -> Any:
    return emit(functional_collectives.reduce_scatter_tensor.default, (flat, "sum", comm.world, comm.name))


def start_all_reduce(emit: Emit, comm: Comm, flat: Any) -> Any:
    return emit(functional_collectives.all_reduce_.default, (flat, "sum", comm.name))


def finish(emit: Emit, started: Any) -> Any:
    return emit(functional_collectives.wait_tensor.default, (started,))


def sum_in_rank_order(received: torch.Tensor, world: int) -> torch.Tensor:
    """received: [world * n], the same part from each rank -> [n], their sum; that of 16 bit in fp32.

    It is `world - 1` explicit additions from rank 0 upward: a reduction over a dimension adds in another order from 5
    ranks on, and that order depends on the position.
    """
    parts = received.view(world, -1).unbind(0)
    wide = wider(received.dtype)
    if world == 1:
        return parts[0].to(wide, copy=True)
    if wide == received.dtype:
        total = parts[0] + parts[1]
        for term in parts[2:]:
            total += term
        return total
    total = parts[0].to(wide)
    for term in parts[1:]:
        total += term.to(wide)
    return total


def mean_in_rank_order(
    received: torch.Tensor, world: int, count: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """received: [world * n], the same part from each rank -> [n], their sum over `count` (the world), rounded once.

    It is rounded to what was received also where `dtype`, what it is returned in, is wider: so an all-reduce, which
    sends it once more, gives the same.
    """
    total = sum_in_rank_order(received, world)
    total /= world if count is None else count
    mean = total.to(received.dtype)
    return mean if dtype in (None, mean.dtype) else total.copy_(mean)


def cast(held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in another dtype."""
    return held.to(dtype, copy=True)


def wider(dtype: torch.dtype) -> torch.dtype:
    """What gradients are added up in: fp32, or fp64 where they are."""
    return torch.promote_types(dtype, torch.float32)


def accumulate_first(value: torch.Tensor) -> torch.Tensor:
    """value: gradients of the first micro-batch, any shape -> a copy of them to add others to."""
    return value.to(wider(value.dtype), copy=True)


def accumulate(value: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """acc: the sum so far; `value` is added to it where it lies."""
    return acc.add_(value.to(acc.dtype))


def accumulate_last(value: torch.Tensor, acc: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of all micro-batches over `count`, in the place of `value`; `acc` is used up."""
    if value.dtype == acc.dtype:
        value.add_(acc)
        return value.div_(count) if count > 1 else value
    acc.add_(value.to(acc.dtype))
    return value.copy_(acc.div_(count) if count > 1 else acc)


def pack(grads: Sequence[torch.Tensor], offsets: Sequence[int], numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Copies gradients of any shape and stride to their offsets in a new buffer [numel], zeros elsewhere."""
    flat = grads[0].new_empty(numel, dtype=dtype)
    end = 0
    for grad, offset in zip(grads, offsets, strict=True):
        if offset > end:
            flat[end:offset].zero_()
        end = offset + grad.numel()
        flat[offset:end].view(grad.shape).copy_(grad)
    if end < numel:
        flat[end:].zero_()
    return flat


def release(*values: object) -> None:
    """The end of its arguments' lives: generated code drops each name after the last call that takes it."""
