import pytest

from tests.graphs import Layer, Node, Param, chain_graph, dag_graph, own
from zplan.errors import SpecError
from zplan.planner.ownership import Interval, Ownership, Slice


def linear(*params: Param, world: int, stage: int = 3, nbytes: int = 1 << 20) -> Ownership:
    graph = dag_graph(params, [Node(weights=(i,)) for i in range(len(params))])
    return own(graph, world=world, stage=stage, bucket_nbytes=nbytes)


def test_a_tensor_is_cut_where_parts_end() -> None:
    ownership = linear(Param(numel=130), Param(numel=100), world=3)
    # 130 elements at 0 and 100 at 192: parts of 128.
    assert ownership.intervals("units.0.p0") == (Interval(0, 0, 128), Interval(1, 128, 130))
    assert ownership.intervals("units.0.p1") == (Interval(1, 0, 64), Interval(2, 64, 100))


def test_a_whole_tensor_belongs_to_rank_0() -> None:
    assert linear(Param(numel=130), world=3, stage=0).intervals("units.0.p0") == (Interval(0, 0, 130),)
    assert linear(Param(numel=130), world=1, stage=3).intervals("units.0.p0") == (Interval(0, 0, 130),)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_zero_size_tensor_has_no_owner(stage: int) -> None:
    ownership = linear(Param(numel=8), Param(numel=0), Param(numel=24), world=2, stage=stage)
    assert ownership.intervals("units.0.p1") == ()


def test_a_zero_size_tensor_at_the_very_end_has_no_owner() -> None:
    ownership = linear(Param(numel=128), Param(numel=0), world=2)
    assert ownership.intervals("units.0.p1") == ()


def test_one_element_on_two_ranks_leaves_one_share_empty() -> None:
    # DeepSpeed#129
    ownership = linear(Param(numel=64), Param(numel=1, group=1), world=2)
    assert ownership.intervals("units.0.p1") == (Interval(1, 0, 1),)
    assert ownership.slices(0) == (Slice("b0", 0, 0, 64),)
    assert ownership.slices(1) == (Slice("b0", 1, 64, 128),)


def test_more_ranks_than_elements() -> None:
    # torchtitan#4593
    ownership = linear(Param(numel=3), world=7)
    assert ownership.intervals("units.0.p0") == (Interval(0, 0, 3),)
    assert [ownership.slices(rank) for rank in range(7)] == [
        (Slice("b0", 0, rank * 64, rank * 64 + 64),) for rank in range(7)
    ]


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^the model has no parameter 'units.0.p9'$"):
        linear(Param(), world=2).intervals("units.0.p9")


def test_slices_are_cut_at_the_borders_of_groups() -> None:
    ownership = linear(Param(numel=100), Param(numel=100, group=1), world=2)
    # Groups at 0 and 128, parts of 128; and with three ranks parts of 128 as well, the last of them padding.
    assert [ownership.slices(rank) for rank in range(2)] == [(Slice("b0", 0, 0, 128),), (Slice("b0", 1, 128, 256),)]
    three = linear(Param(numel=190), Param(numel=100, group=1), world=3)
    assert [three.slices(rank) for rank in range(3)] == [
        (Slice("b0", 0, 0, 128),),
        (Slice("b0", 0, 128, 192), Slice("b0", 1, 192, 256)),
        (Slice("b0", 1, 256, 384),),
    ]
    assert [piece.numel for piece in three.slices(1)] == [64, 64]


def test_at_stage_0_every_rank_updates_all() -> None:
    ownership = linear(Param(numel=100), Param(numel=100, group=1), world=2, stage=0)
    every = (Slice("b0", 0, 0, 128), Slice("b0", 1, 128, 256))
    assert [ownership.slices(rank) for rank in range(2)] == [every, every]


def test_frozen_buckets_have_no_slices() -> None:
    assert linear(Param(frozen=True), world=2).slices(0) == ()


def test_a_slice_of_a_zero_size_tensor_holds_padding_alone() -> None:
    ownership = linear(Param(numel=64), Param(numel=0, group=1), world=2)
    assert ownership.slices(1) == (Slice("b0", 1, 64, 128),)
    ownership = linear(Param(numel=0), Param(numel=64, group=1), world=2)
    assert ownership.slices(0) == (Slice("b0", 1, 0, 64),)


def test_one_tensor_far_larger_than_all_others_is_balanced() -> None:
    # pytorch#59410
    small = [Param(numel=64, unit=i) for i in range(1, 9)]
    ownership = linear(Param(numel=1_000_000), *small, world=4)
    shares = ownership.intervals("units.0.p0")
    assert [interval.rank for interval in shares] == [0, 1, 2, 3]
    assert ownership.imbalance == pytest.approx(1.0, abs=0.001)


def test_imbalance() -> None:
    assert linear(Param(numel=256), world=4).imbalance == 1.0
    assert linear(Param(numel=64), world=4).imbalance == 4.0
    assert linear(Param(numel=96), world=2).imbalance == pytest.approx(64 / 48)
    assert linear(Param(numel=0), world=2).imbalance == 1.0
    assert linear(Param(numel=64), world=4, stage=0).imbalance == 1.0


def test_home_names_the_bucket_of_every_tensor() -> None:
    ownership = own(chain_graph([Layer(), Layer()]), world=2)
    assert ownership.home == {"layers.0.weight": "b0", "layers.1.weight": "b1"}
    assert list(ownership.bucket) == ["b0", "b1"]
