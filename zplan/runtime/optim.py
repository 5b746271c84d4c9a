"""Optim: the user's optimizer on what this rank owns."""

from collections.abc import Mapping, Sequence

import torch

from zplan.graph.optimizer import rebind
from zplan.planner.ownership import Ownership, Slice


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
        rank: int,
        buckets: Sequence[str],
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
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
        for parameter, bucket, start, stop in self._where:
            parameter.grad = grads[bucket][start:stop].to(parameter.dtype)
        try:
            self.optimizer.step()
        finally:
            for parameter, *_ in self._where:
                parameter.grad = None


def _base(ownership: Ownership, piece: Slice, rank: int) -> int:
    bucket = ownership.bucket[piece.bucket]
    return 0 if bucket.state_whole else rank * bucket.part
