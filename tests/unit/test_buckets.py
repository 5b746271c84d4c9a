from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.graphs import Layer, Node, Param, chain_graph, dag_graph
from zplan.graph.ir import Graph
from zplan.planner.buckets import ALIGNMENT, Bucket, make_buckets, unit_of
from zplan.planner.choices import Choice


def buckets(graph: Graph, *, world: int = 2, stages: Sequence[int] = (3,), nbytes: int = 1 << 20) -> tuple[Bucket, ...]:
    choices = {t.name: Choice(stages[i % len(stages)], "test") for i, t in enumerate(graph.tensors)}
    return make_buckets(graph, choices, world=world, bucket_nbytes=nbytes)


def names(found: Sequence[Bucket]) -> list[list[str]]:
    return [[slot.tensor for slot in bucket.slots] for bucket in found]


def linear(*params: Param) -> Graph:
    """Each parameter is read by one op of its own, in the order given."""
    return dag_graph(params, [Node(weights=(i,)) for i in range(len(params))])


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("blocks.3.attn.qkv.weight", "blocks.3"),
        ("model.layers.11.mlp.weight", "model.layers.11"),
        ("moe.0.experts.7.weight", "moe.0"),
        ("wte.weight", "wte"),
        ("encoder.norm.weight", "encoder"),
        ("scale", ""),
        ("0.weight", "0"),
        ("list.0", "list"),
    ],
)
def test_unit_of(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_a_bucket_holds_tensors_in_the_order_of_their_first_use() -> None:
    graph = dag_graph([Param(unit=i) for i in range(3)], [Node(weights=(2,)), Node(weights=(0,)), Node(weights=(1,))])
    assert names(buckets(graph)) == [["units.2.p2", "units.0.p0", "units.1.p1"]]


def test_a_tensor_that_forward_does_not_read_comes_last() -> None:
    graph = dag_graph([Param(unit=0), Param(unit=1)], [Node(weights=(0,), forward=False), Node(weights=(1,))])
    assert names(buckets(graph)) == [["units.1.p1", "units.0.p0"]]


def test_buckets_are_the_same_in_every_run() -> None:
    layers = [Layer(numel=100 + i, dtype=("fp32", "bf16")[i % 2], group=i % 3) for i in range(12)]
    assert buckets(chain_graph(layers), stages=(0, 3)) == buckets(chain_graph(layers), stages=(0, 3))


def test_dtypes_travel_apart() -> None:
    graph = linear(Param(dtype="bf16"), Param(dtype="fp32"), Param(dtype="bf16"))
    found = buckets(graph)
    assert names(found) == [["units.0.p0", "units.0.p2"], ["units.0.p1"]]
    assert [bucket.dtype for bucket in found] == ["bf16", "fp32"]


def test_stages_travel_apart() -> None:
    found = buckets(linear(Param(), Param(), Param()), stages=(3, 1))
    assert names(found) == [["units.0.p0", "units.0.p2"], ["units.0.p1"]]
    assert [bucket.stage for bucket in found] == [3, 1]


def test_what_trains_travels_apart_from_what_does_not() -> None:
    found = buckets(linear(Param(), Param(frozen=True), Param()))
    assert names(found) == [["units.0.p0", "units.0.p2"], ["units.0.p1"]]
    assert [bucket.trains for bucket in found] == [True, False]


def test_a_parameter_without_a_gradient_does_not_train() -> None:
    graph = dag_graph([Param(), Param()], [Node(weights=(0,))])
    assert [(names([bucket]), bucket.trains) for bucket in buckets(graph)] == [
        ([["units.0.p0"]], True),
        ([["units.0.p1"]], False),
    ]


def test_units_are_put_together_while_they_fit() -> None:
    graph = chain_graph([Layer(numel=64) for _ in range(5)])
    assert [len(bucket.slots) for bucket in buckets(graph, nbytes=2 * 256)] == [2, 2, 1]


def test_a_bucket_ends_at_the_border_of_a_unit() -> None:
    params = [Param(numel=64, unit=0), *[Param(numel=64, unit=1)] * 2, *[Param(numel=64, unit=2)] * 2]
    found = buckets(linear(*params), nbytes=4 * 256)
    assert names(found) == [["units.0.p0", "units.1.p1", "units.1.p2"], ["units.2.p3", "units.2.p4"]]


def test_a_unit_larger_than_a_bucket_is_cut_between_its_tensors() -> None:
    params = [Param(numel=64, unit=0), *[Param(numel=64, unit=1)] * 3]
    found = buckets(linear(*params), nbytes=2 * 256)
    assert names(found) == [["units.0.p0"], ["units.1.p1", "units.1.p2"], ["units.1.p3"]]


def test_a_tensor_larger_than_a_bucket_is_not_cut() -> None:
    found = buckets(linear(Param(numel=64), Param(numel=10_000), Param(numel=64)), nbytes=1)
    assert [bucket.slots[0].numel for bucket in found] == [64, 10_000, 64]


def test_bucket_size_counts_what_is_laid_out() -> None:
    # 65 elements take 128 with their padding: two of them fill 1024 bytes.
    graph = chain_graph([Layer(numel=65) for _ in range(4)])
    assert [len(bucket.slots) for bucket in buckets(graph, nbytes=1024)] == [2, 2]
    assert [len(bucket.slots) for bucket in buckets(graph, nbytes=1023)] == [1, 1, 1, 1]


def test_a_tied_tensor_used_far_apart_is_alone() -> None:
    graph = chain_graph([Layer(), Layer(), Layer(), Layer(tied=0)])
    assert names(buckets(graph)) == [["layers.0.weight"], ["layers.1.weight", "layers.2.weight"]]


def test_a_tensor_used_twice_with_nothing_between_is_not_alone() -> None:
    graph = chain_graph([Layer(), Layer(tied=0), Layer()])
    assert names(buckets(graph)) == [["layers.0.weight", "layers.2.weight"]]


def test_a_block_applied_twice_has_buckets_of_its_own() -> None:
    params = [Param(unit=0), Param(unit=0), Param(unit=1)]
    graph = dag_graph(params, [Node(weights=(0, 1)), Node(weights=(2,)), Node(weights=(0, 1))])
    assert names(buckets(graph)) == [["units.0.p0", "units.0.p1"], ["units.1.p2"]]


def test_tensors_of_one_optimizer_group_lie_side_by_side() -> None:
    graph = linear(Param(group=1), Param(group=0), Param(group=1), Param(group=0))
    (found,) = buckets(graph)
    assert [(slot.tensor, slot.group, slot.offset) for slot in found.slots] == [
        ("units.0.p1", 0, 0),
        ("units.0.p3", 0, 256),
        ("units.0.p0", 1, 512),
        ("units.0.p2", 1, 768),
    ]


def test_every_tensor_starts_and_every_part_ends_at_a_multiple_of_64() -> None:
    (found,) = buckets(linear(Param(numel=1), Param(numel=65), Param(numel=64)), world=3)
    assert ALIGNMENT == 64
    assert [slot.offset for slot in found.slots] == [0, 64, 192]
    assert [slot.end for slot in found.slots] == [1, 129, 256]
    assert (found.part, found.numel, found.padding) == (128, 384, 384 - 130)
    assert (found.nbytes, found.part_nbytes) == (4 * 384, 4 * 128)


def test_bytes_go_by_the_dtype() -> None:
    (found,) = buckets(linear(Param(dtype="bf16")), world=4)
    assert (found.nbytes, found.part_nbytes) == (512, 128)


def test_a_zero_size_tensor_keeps_its_place() -> None:
    # DeepSpeed#8279: sizes 8, 0, 24 on 2 ranks.
    (found,) = buckets(linear(Param(numel=8), Param(numel=0), Param(numel=24)))
    assert [(slot.shape, slot.offset, slot.numel) for slot in found.slots] == [
        ((8,), 0, 8),
        ((0,), 64, 0),
        ((24,), 64, 24),
    ]
    assert (found.part, found.padding) == (64, 96)


def test_a_bucket_of_nothing_but_zero_size_tensors_has_the_least_parts() -> None:
    (found,) = buckets(linear(Param(numel=0)), world=3)
    assert (found.part, found.numel, found.padding) == (64, 192, 192)


def test_more_ranks_than_elements() -> None:
    # torchtitan#4593
    (found,) = buckets(linear(Param(numel=3)), world=7)
    assert (found.part, found.numel) == (64, 448)


def test_what_is_whole_at_rest() -> None:
    def at_rest(stage: int, *, world: int = 2, frozen: bool = False) -> bool:
        (found,) = buckets(linear(Param(frozen=frozen)), world=world, stages=(stage,))
        return found.whole_at_rest

    assert [at_rest(stage) for stage in range(4)] == [True, False, False, False]
    assert [at_rest(stage, frozen=True) for stage in range(4)] == [True, True, True, False]
    assert [at_rest(stage, world=1) for stage in range(4)] == [True] * 4


def test_who_updates_all() -> None:
    def all_of_it(stage: int, *, world: int = 2) -> bool:
        (found,) = buckets(linear(Param()), world=world, stages=(stage,))
        return found.state_whole

    assert [all_of_it(stage) for stage in range(4)] == [True, False, False, False]
    assert [all_of_it(stage, world=1) for stage in range(4)] == [True] * 4


def test_a_name_with_another_shape_makes_other_buckets() -> None:
    graph = linear(Param())
    (tensor,) = graph.tensors
    wide = replace(graph, tensors=(replace(tensor, shape=(16, 16)),))
    assert buckets(graph) != buckets(wide)


def test_a_tensor_above_the_limit_takes_small_ones_before_it_along() -> None:
    """A norm before a matrix is no collective of its own; half a matrix before a matrix is."""
    sizes = [64, 8 * 64, 2 * 64, 8 * 64]
    graph = dag_graph([Param(size) for size in sizes], [Node(weights=(i,)) for i in range(len(sizes))])
    choices = {tensor.name: Choice(3, "") for tensor in graph.tensors}
    buckets = make_buckets(graph, choices, world=2, bucket_nbytes=4 * 64 * 4)
    assert [[slot.numel for slot in bucket.slots] for bucket in buckets] == [[64, 512], [128], [512]]
