"""Ownership: which rank owns which interval of which tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zplan.errors import SpecError
from zplan.planner.buckets import Bucket


@dataclass(frozen=True, slots=True)
class Interval:
    """Elements `[start, stop)` of a flattened tensor, owned by `rank`."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `[start, stop)` of a bucket that one rank updates under one optimizer group, padding included."""

    bucket: str
    group: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Ownership:
    """Answers every question about who owns what; made from the buckets alone."""

    buckets: tuple[Bucket, ...]
    world: int

    @cached_property
    def bucket(self) -> Mapping[str, Bucket]:
        return {bucket.name: bucket for bucket in self.buckets}

    @cached_property
    def home(self) -> Mapping[str, str]:
        """Tensor name -> the name of its bucket."""
        return {slot.tensor: bucket.name for bucket in self.buckets for slot in bucket.slots}

    def intervals(self, tensor: str) -> tuple[Interval, ...]:
        """The tensor, cut where a part ends; in rank order, without gaps; empty shares are left out.

        A tensor that every rank updates (stage 0) belongs to rank 0 here, whose copy is the one that is saved.
        """
        if tensor not in self.home:
            raise SpecError(f"the model has no parameter {tensor!r}")
        bucket = self.bucket[self.home[tensor]]
        slot = next(slot for slot in bucket.slots if slot.tensor == tensor)
        if bucket.whole_at_rest:
            return (Interval(0, 0, slot.numel),) if slot.numel else ()
        found = []
        for rank in range(slot.offset // bucket.part, bucket.world):
            low = max(slot.offset, rank * bucket.part)
            high = min(slot.end, (rank + 1) * bucket.part)
            if low >= high:
                break
            found.append(Interval(rank, low - slot.offset, high - slot.offset))
        return tuple(found)

    def slices(self, rank: int) -> tuple[Slice, ...]:
        """What `rank` updates: for each bucket that trains, its part (or all of it), cut at group borders.

        Padding goes with the tensor before it: elements there are zero, get zero gradients, and stay zero.
        """
        found = []
        for bucket in self.buckets:
            if not bucket.trains:
                continue
            low, high = (0, bucket.numel) if bucket.state_whole else (rank * bucket.part, (rank + 1) * bucket.part)
            for group, start, stop in self._runs[bucket.name]:
                start, stop = max(start, low), min(stop, high)
                if start < stop:
                    found.append(Slice(bucket.name, group, start, stop))
        return tuple(found)

    @cached_property
    def _runs(self) -> Mapping[str, list[tuple[int, int, int]]]:
        return {bucket.name: _runs(bucket) for bucket in self.buckets}

    @property
    def imbalance(self) -> float:
        """Elements of the fullest rank over the mean; 1.0 is even. Padding does not count."""
        held = [0] * self.world
        for bucket in self.buckets:
            if bucket.whole_at_rest:
                continue
            for slot in bucket.slots:
                for interval in self.intervals(slot.tensor):
                    held[interval.rank] += interval.stop - interval.start
        mean = sum(held) / self.world
        return max(held) / mean if mean else 1.0


def _runs(bucket: Bucket) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for slot in bucket.slots:
        if slot.group is None:
            continue
        if runs and runs[-1][0] == slot.group:
            runs[-1] = (slot.group, runs[-1][1], slot.offset + slot.numel)
        else:
            if runs:
                runs[-1] = (runs[-1][0], runs[-1][1], slot.offset)
            runs.append((slot.group, slot.offset, slot.offset + slot.numel))
    if runs:
        runs[-1] = (runs[-1][0], runs[-1][1], bucket.numel)
    return runs
