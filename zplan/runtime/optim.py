"""Optim: the user's optimizer on what this rank owns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from zplan.graph.optimizer import rebind
from zplan.planner.ownership import Ownership, Slice
from zplan.runtime.comm import Comm

# Elements that are squared in fp64 at once: what that takes stays small beside any bucket.
CHUNK = 1 << 16


@dataclass(frozen=True)
class Clipping:
    """What is done to gradients between their reduction and the update.

    `norm`: the most that the norm of all gradients may be; they are scaled down to it (None: they are left as they
    are). `skip`: where the norm is not finite, no rank updates anything.
    """

    norm: float | None = None
    skip: bool = False

    def __bool__(self) -> bool:
        return self.norm is not None or self.skip


NO_CLIPPING = Clipping()


class LossScale:
    """Dynamic scaling of the loss, so that small gradients are no zeros in fp16.

    `value`: a scalar that the traced step multiplies the gradient of the loss by. It is halved when gradients are not
    finite, and doubled after `interval` updates in a row. Powers of two: dividing by it again is exact.
    """

    def __init__(self, value: torch.Tensor, *, start: float, interval: int) -> None:
        self.value = value
        self.interval = interval
        self.finite = 0
        value.fill_(start)

    def follow(self, *, skipped: bool) -> None:
        """Takes note of a step; all ranks skip the same ones, so all keep the same scale."""
        if skipped:
            self.value.mul_(0.5)
            self.finite = 0
            return
        self.finite += 1
        if self.finite == self.interval:
            self.value.mul_(2.0)
            self.finite = 0


class Shards(torch.nn.Module):
    """Slices of flat buffers, handed to an optimizer in its own groups; called with gradients, it steps.

    `held[bucket]`: [part] or [world * part], what this rank updates of a bucket. Slices are views of it, so a step
    changes it in place.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ownership: Ownership,
        held: Mapping[str, torch.Tensor],
        *,
        comm: Comm,
        buckets: Sequence[str],
        clipping: Clipping,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__()
        rank = comm.rank
        self.optimizer = optimizer
        self.comm = comm
        self.clipping = clipping
        self.loss_scale = loss_scale
        self.norm: torch.Tensor | None = None
        self.skipped = False
        self._tensors = list(_pieces(ownership, buckets, rank))
        # A plain list: slices are no parameters of this module.
        self._where: list[tuple[torch.nn.Parameter, int, int, int]] = []
        order = {name: i for i, name in enumerate(buckets)}
        groups: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for piece in ownership.slices(rank):
            base = _base(ownership, piece, rank)
            start, stop = piece.start - base, piece.stop - base
            parameter = torch.nn.Parameter(held[piece.bucket][start:stop])
            groups[piece.group].append(parameter)
            self._where.append((parameter, order[piece.bucket], start, stop))
        rebind(optimizer, groups)

    def forward(self, *grads: torch.Tensor) -> None:
        """grads[i]: as `held` of the i-th bucket, averaged over ranks; views of it are given to the optimizer."""
        if self.loss_scale is not None:
            for grad in grads:
                grad.div_(self.loss_scale.value)
        updates = not (self.clipping or self.loss_scale) or self._clip(grads)
        if self.loss_scale is not None:
            self.loss_scale.follow(skipped=self.skipped)
        if not updates:
            return
        for parameter, bucket, start, stop in self._where:
            parameter.grad = grads[bucket][start:stop].to(parameter.dtype)
        try:
            self.optimizer.step()
        finally:
            for parameter, *_ in self._where:
                parameter.grad = None

    def _clip(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether to update. Communicates 8 bytes of each rank; all come to the same norm and the same answer."""
        shared = grads[0].new_zeros(1, dtype=torch.float64) if grads else torch.zeros(1, dtype=torch.float64)
        own = shared.clone()
        for bucket, start, stop, whole in self._tensors:
            (shared if whole else own).add_(_squares(grads[bucket][start:stop]))
        self.norm = (shared + self.comm.total(own)).sqrt()[0]
        self.skipped = (self.clipping.skip or self.loss_scale is not None) and not bool(self.norm.isfinite())
        if self.skipped:
            return False
        if self.clipping.norm is not None:
            # As torch's clip_grad_norm_ has it.
            scale = torch.clamp(self.clipping.norm / (self.norm + 1e-6), max=1.0)
            for grad in grads:
                grad.mul_(scale)
        return True


def _squares(grad: torch.Tensor) -> torch.Tensor:
    """The sum of squares in fp64."""
    total = grad.new_zeros(1, dtype=torch.float64)
    for start in range(0, grad.numel(), CHUNK):
        wide = grad[start : start + CHUNK].to(torch.float64)
        total += wide.dot(wide)
    return total


def _pieces(ownership: Ownership, buckets: Sequence[str], rank: int) -> Iterator[tuple[int, int, int, bool]]:
    """What this rank squares: (bucket, start, stop) in the gradient it holds, one for each tensor; and whether every
    rank holds the same, so that it counts once."""
    for index, name in enumerate(buckets):
        bucket = ownership.bucket[name]
        low = 0 if bucket.state_whole else rank * bucket.part
        high = bucket.numel if bucket.state_whole else low + bucket.part
        for slot in bucket.slots:
            start, stop = max(slot.offset, low), min(slot.end, high)
            if start < stop:
                yield index, start - low, stop - low, bucket.state_whole


def _base(ownership: Ownership, piece: Slice, rank: int) -> int:
    bucket = ownership.bucket[piece.bucket]
    return 0 if bucket.state_whole else rank * bucket.part
