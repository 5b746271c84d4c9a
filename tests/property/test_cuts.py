"""Buckets and ownership over random graphs: every element of every tensor has one place and one owner."""

from hypothesis import given

from tests.strategies import EXAMPLES, Case, cases
from zplan.planner.buckets import unit_of


@EXAMPLES
@given(cases())
def test_every_tensor_lies_in_one_bucket_of_its_kind(case: Case) -> None:
    tensors = case.graph.tensor
    slots = [(slot, bucket) for bucket in case.ownership.buckets for slot in bucket.slots]
    assert sorted(slot.tensor for slot, _ in slots) == sorted(tensors)
    for slot, bucket in slots:
        tensor = tensors[slot.tensor]
        assert (slot.shape, slot.numel, slot.group) == (tensor.shape, tensor.numel, tensor.group)
        assert (bucket.dtype, bucket.trains) == (tensor.dtype, tensor.grad is not None)
    for bucket in case.ownership.buckets:
        assert bucket.slots
        assert bucket.world == case.ownership.world


@EXAMPLES
@given(cases())
def test_slots_lie_one_after_another_and_all_cuts_are_at_multiples_of_64(case: Case) -> None:
    for bucket in case.ownership.buckets:
        used: set[int] = set()
        end = 0
        for slot in bucket.slots:
            assert slot.offset % 64 == 0
            assert slot.offset - end < 64
            elements = set(range(slot.offset, slot.offset + slot.numel))
            assert not used & elements
            used |= elements
            end = slot.offset + slot.numel
        assert end <= bucket.numel
        assert bucket.part % 64 == 0
        assert bucket.part >= 64
        assert bucket.padding == bucket.numel - len(used)
        # No rank's part could be one step shorter.
        assert bucket.part == 64 or (bucket.part - 64) * bucket.world < -(-end // 64) * 64


@EXAMPLES
@given(cases())
def test_every_element_has_one_owner(case: Case) -> None:
    for bucket in case.ownership.buckets:
        for slot in bucket.slots:
            owners: list[int] = []
            for interval in case.ownership.intervals(slot.tensor):
                assert interval.start == len(owners)
                assert interval.start < interval.stop
                owners += [interval.rank] * (interval.stop - interval.start)
            if bucket.whole_at_rest:
                assert owners == [0] * slot.numel
            else:
                assert owners == [(slot.offset + i) // bucket.part for i in range(slot.numel)]


@EXAMPLES
@given(cases())
def test_slices_cover_every_trained_bucket_once_and_each_lies_in_one_group(case: Case) -> None:
    ownership = case.ownership
    for bucket in ownership.buckets:
        covered = [0] * bucket.numel
        for rank in range(ownership.world):
            for piece in ownership.slices(rank):
                if piece.bucket != bucket.name:
                    continue
                assert 0 <= piece.start < piece.stop <= bucket.numel
                for slot in bucket.slots:
                    if slot.offset < piece.stop and piece.start < slot.offset + slot.numel:
                        assert slot.group == piece.group
                for element in range(piece.start, piece.stop):
                    covered[element] += 1
        for rank in range(ownership.world):
            groups = [piece.group for piece in ownership.slices(rank) if piece.bucket == bucket.name]
            assert len(groups) == len(set(groups)), "a rank's share of a group is one slice"
        times = 0 if not bucket.trains else ownership.world if bucket.state_whole else 1
        assert covered == [times] * bucket.numel


@EXAMPLES
@given(cases())
def test_a_bucket_ends_at_the_border_of_a_unit_unless_the_unit_alone_is_too_large(case: Case) -> None:
    held: dict[tuple[str, str, int, bool], set[str]] = {}
    for bucket in case.ownership.buckets:
        for slot in bucket.slots:
            unit = (unit_of(slot.tensor), bucket.dtype, bucket.stage, bucket.trains)
            held.setdefault(unit, set()).add(bucket.name)
    for (unit, *_), names in held.items():
        if len(names) == 1:
            continue
        units = [{unit_of(slot.tensor) for slot in case.ownership.bucket[name].slots} for name in sorted(names)]
        # Cut inside a unit: all but the last of its buckets hold that unit alone.
        assert sum(found != {unit} for found in units) <= 1
