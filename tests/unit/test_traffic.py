import pytest

from tests.graphs import Layer, Node, Param, chain_graph, dag_graph, own
from zplan.graph.ir import Graph
from zplan.planner.lower import lower
from zplan.planner.pipeline import build
from zplan.planner.program import AllReduce, Free, Gather, GatherGradient, ReduceScatter, Run, Wait
from zplan.planner.traffic import Traffic, sent_nbytes

TWO = chain_graph([Layer(numel=256), Layer(numel=1000)])


def traffic(stage: int, *, world: int = 4, graph: Graph = TWO, native: bool = False) -> Traffic:
    return Traffic(build(graph, own(graph, world=world, stage=stage), native=native))


def test_bytes_of_each_instruction() -> None:
    program = lower(TWO, own(TWO, world=4))
    # 256 elements of 4 bytes on 4 ranks: parts of 256 bytes, sent three times.
    assert sent_nbytes(program, Gather(0, "b0")) == 768
    assert sent_nbytes(program, ReduceScatter(0, "b0")) == 768
    assert sent_nbytes(program, GatherGradient(0, "b0")) == 768
    assert sent_nbytes(program, AllReduce(0, "b0")) == 1536
    assert sent_nbytes(program, Wait(0)) == sent_nbytes(program, Run("f0")) == sent_nbytes(program, Free("f0")) == 0


@pytest.mark.parametrize(("stage", "psi"), [(0, 2), (1, 2), (2, 2), (3, 3)])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_is_sent_is_that_of_the_paper(stage: int, psi: int, world: int) -> None:
    found = traffic(stage, world=world)
    nbytes = sum(bucket.nbytes for bucket in found.program.ownership.buckets)
    assert found.bytes_per_rank == psi * nbytes * (world - 1) // world


def test_a_native_all_reduce_sends_as_much_as_its_halves() -> None:
    assert traffic(0, native=True).bytes_per_rank == traffic(0).bytes_per_rank


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        (0, ["reduce-scatter", "gather gradients"]),
        (1, ["gather", "reduce-scatter"]),
        (3, ["gather", "reduce-scatter"]),
    ],
)
def test_by_kind(stage: int, kinds: list[str]) -> None:
    found = traffic(stage)
    assert list(found.by_kind) == kinds
    assert sum(found.by_kind.values()) == found.bytes_per_rank
    assert list(traffic(0, native=True).by_kind) == ["all-reduce"]


def test_padding_is_counted_and_told() -> None:
    found = traffic(2)
    # 1000 elements take 4 parts of 256: 24 of padding, sent twice in three parts of four.
    assert found.padding_nbytes == 2 * 24 * 4 * 3 // 4
    assert traffic(2, graph=chain_graph([Layer(numel=256)])).padding_nbytes == 0


def test_one_rank_sends_nothing() -> None:
    assert traffic(3, world=1).bytes_per_rank == 0
    assert traffic(3, world=1).by_kind == {}


@pytest.mark.parametrize(("stage", "sent"), [(0, 0), (1, 0), (2, 0), (3, 2)])
def test_frozen_parameters_are_sent_only_where_they_are_sharded(stage: int, sent: int) -> None:
    found = traffic(stage, graph=chain_graph([Layer(frozen=True)]))
    assert found.bytes_per_rank == sent * 768


def test_unused_parameters_are_never_sent() -> None:
    graph = dag_graph([Param(), Param()], [Node(weights=(0,))])
    assert traffic(3, graph=graph).bytes_per_rank == traffic(3, graph=dag_graph([Param()], [Node()])).bytes_per_rank


def test_16_bit_parameters_send_half() -> None:
    graph = chain_graph([Layer(dtype="bf16")])
    assert traffic(3, graph=graph).bytes_per_rank * 2 == traffic(3, graph=chain_graph([Layer()])).bytes_per_rank
