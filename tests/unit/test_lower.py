from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.graphs import Builder, Layer, Node, Param, chain_graph, dag_graph, lines, own, with_masters
from zplan.graph.ir import Graph, OpKind, Phase, Tensor
from zplan.planner.check import check
from zplan.planner.lower import lower
from zplan.planner.program import (
    LAUNCHES,
    REDUCTIONS,
    AllReduce,
    Free,
    Gather,
    GatherGradient,
    Pack,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
)

TWO = chain_graph([Layer(), Layer(cast=True)])
MIXED = chain_graph(
    [Layer(), Layer(dtype="bf16", cast=True), Layer(frozen=True), Layer(random=True, group=1), Layer(tied=0)],
    buffer=True,
)


def toy(stage: int = 3, *, graph: Graph = TWO, world: int = 2, native: bool = False) -> Program:
    return check(lower(graph, own(graph, world=world, stage=stage), native=native))


def place(program: Program, instruction: object, nth: int = 0) -> int:
    return [i for i, x in enumerate(program.instructions) if x == instruction][nth]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_lower_two_layers_is_as_printed(stage: int, golden: Callable[[str, str], None]) -> None:
    golden(f"lower/two_layers_stage_{stage}", lines(toy(stage)))


@pytest.mark.parametrize("stage", [0, 3])
def test_lower_with_masters_is_as_printed(stage: int, golden: Callable[[str, str], None]) -> None:
    low = with_masters(chain_graph([Layer(dtype="bf16"), Layer()]))
    golden(f"lower/masters_stage_{stage}", lines(check(lower(low, own(low, world=2, stage=stage, reduce="fp32")))))


def test_lower_all_reduce_is_as_printed(golden: Callable[[str, str], None]) -> None:
    golden("lower/two_layers_native_all_reduce", lines(toy(0, native=True)))


def test_lower_one_rank_is_as_printed(golden: Callable[[str, str], None]) -> None:
    golden("lower/two_layers_one_rank", lines(toy(3, world=1)))


def test_lower_a_mixed_model_is_as_printed(golden: Callable[[str, str], None]) -> None:
    ownership = own(MIXED, world=3, stage=[0, 3, 3, 1])
    golden("lower/mixed_stages", lines(check(lower(MIXED, ownership))))


def test_gathers_come_just_before_the_first_use_and_frees_just_after_the_last() -> None:
    program = toy()
    x = program.instructions
    start = place(program, Gather(0, "b0"))
    assert x[start : start + 6] == (
        Gather(0, "b0"),
        Wait(0),
        Run("t0"),
        Run("f0"),
        Free("t0"),
        Free("b0:whole"),
    )


def test_gradients_are_reduced_when_ready() -> None:
    program = toy()
    start = place(program, Run("dw1"))
    tail = [x for x in program.instructions[start + 1 :] if x != Free("y0")]
    assert tail[:5] == [Pack("b1"), Free("dw1"), ReduceScatter(2, "b1"), Wait(2), Free("b1:flat")]


def test_a_bucket_is_reduced_when_the_last_of_its_gradients_is_ready() -> None:
    program = lower(TWO, own(TWO, world=2, bucket_nbytes=1 << 20))
    check(program)
    assert place(program, Pack("b0")) > max(place(program, Run("dw0")), place(program, Run("dw1")))
    assert Counter(type(x) for x in program.instructions)[ReduceScatter] == 1


def test_views_and_casts_are_run_again_in_each_phase_that_reads_them() -> None:
    program = toy()
    for name in ("t0", "t1"):
        forward, backward = place(program, Run(name)), place(program, Run(name), 1)
        assert forward < program.boundary <= backward
        assert place(program, Free(name)) < program.boundary <= place(program, Free(name), 1)


def test_a_chain_is_run_in_order_just_before_it_is_read() -> None:
    graph = dag_graph([Param()], [Node(through="view cast")])
    program = check(lower(graph, own(graph, world=2)))
    for reader, nth in (("f0", 0), ("b0", 1)):
        at = place(program, Run(reader))
        before = [x for x in program.instructions[:at] if isinstance(x, Run)][-2:]
        assert before == [Run("view0"), Run("cast1")]
        assert place(program, Run("cast1"), nth) < at


def test_a_view_that_only_one_phase_reads_is_run_once() -> None:
    graph = dag_graph([Param(), Param()], [Node(weights=(0,), backward=False), Node(weights=(1,), forward=False)])
    program = check(lower(graph, own(graph, world=2)))
    runs = Counter(x.op for x in program.instructions if isinstance(x, Run))
    assert (runs["view0"], runs["view1"]) == (1, 1)
    assert place(program, Run("view0")) < program.boundary <= place(program, Run("view1"))


def test_a_view_that_nobody_reads_is_not_run() -> None:
    build = chain_graph([Layer()])
    dead = replace(build.ops[0], name="dead", outputs=("dead",))
    values = {**build.values, "dead": replace(build.values["t0"], name="dead")}
    graph = replace(build, ops=(dead, *build.ops), values=values)
    program = check(lower(graph, own(graph, world=2)))
    assert Run("dead") not in program.instructions


def test_a_view_of_two_parameters_has_both_chains() -> None:
    """An op that views one parameter and takes its shape from a view of another."""
    build = Builder()
    build.value("batch.0", 64)
    names = ("a.weight", "b.weight")
    for name in names:
        build.value(name, 64)
    for i, name in enumerate(names):
        build.op(f"t{i}", [name], [build.value(f"t{i}", 64, storage=name)], Phase.FORWARD, "", OpKind.VIEW)
    build.op("v", ["t0", "t1"], [build.value("v", 64, storage=names[0])], Phase.FORWARD, "", OpKind.VIEW)
    build.op("loss", ["v", "batch.0"], [build.value("loss", 1)], Phase.FORWARD, "", OpKind.COMPUTE)
    build.op("g", ["loss", "v"], [build.value("g", 64)], Phase.BACKWARD, "", OpKind.COMPUTE)
    tensors = tuple(
        Tensor(n, (n,), (64,), "fp32", n[0], True, grad, 0 if grad else None)
        for n, grad in zip(names, ("g", None), strict=True)
    )
    graph = Graph(tensors, build.values, build.storages, tuple(build.ops), ("loss",), batch=("batch.0",))
    program = check(lower(graph, own(graph, world=2)))
    runs = Counter(x.op for x in program.instructions if isinstance(x, Run))
    assert runs == {"t0": 2, "t1": 2, "v": 2, "loss": 1, "g": 1}


def test_every_value_is_freed_just_after_its_last_reader() -> None:
    program = toy()
    last = place(program, Run("dw1"))
    assert program.instructions[last + 1] == Free("y0")


def test_a_value_that_nobody_reads_is_freed_at_once() -> None:
    graph = dag_graph([Param()], [Node(outputs=2), Node(inputs=(1,), weights=())])
    program = check(lower(graph, own(graph, world=2)))
    at = place(program, Run("f0"))
    assert Free("y0_1") in program.instructions[at + 1 : at + 4]


def test_ids_count_up_in_the_order_of_launches() -> None:
    ids = [x.id for x in toy(0).instructions if isinstance(x, LAUNCHES)]
    assert ids == list(range(len(ids)))


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_has_no_collectives(stage: int) -> None:
    program = toy(stage, graph=MIXED, world=1)
    assert not any(isinstance(x, (*LAUNCHES, Wait)) for x in program.instructions)
    assert program.entry[0] == "b0:whole"


def test_frozen_parameters_are_gathered_and_never_reduced() -> None:
    graph = chain_graph([Layer(), Layer(frozen=True)])
    program = toy(graph=graph)
    counts = Counter((type(x).__name__, x.bucket) for x in program.instructions if isinstance(x, LAUNCHES))
    assert counts == {("Gather", "b0"): 2, ("Gather", "b1"): 2, ("ReduceScatter", "b0"): 1}
    assert Update(("b0",)) in program.instructions


@pytest.mark.parametrize("stage", [1, 2])
def test_frozen_parameters_are_not_sharded_below_stage_3(stage: int) -> None:
    program = toy(stage, graph=chain_graph([Layer(), Layer(frozen=True)]))
    assert "b1:whole" in program.entry
    assert not [x for x in program.instructions if isinstance(x, LAUNCHES) and x.bucket == "b1"]


def test_a_parameter_that_never_gets_a_gradient_has_no_collective() -> None:
    # DeepSpeed#777, pytorch#101192
    graph = dag_graph([Param(), Param()], [Node(weights=(0,))])
    program = toy(graph=graph)
    assert "b1:part" in program.entry
    assert not [x for x in program.instructions if getattr(x, "bucket", None) == "b1"]


def test_a_model_without_trained_parameters_has_no_update() -> None:
    program = toy(graph=chain_graph([Layer(frozen=True)]))
    assert not [x for x in program.instructions if isinstance(x, (Update, Pack, *REDUCTIONS))]


def test_a_gradient_that_forward_made_is_packed_in_backward() -> None:
    graph = chain_graph([Layer(width=256)])
    (tensor,) = graph.tensors
    early = replace(graph, tensors=(replace(tensor, grad="y0"),))
    program = check(lower(early, own(early, world=2)))
    assert place(program, Pack("b0")) > program.boundary


def test_all_reduce_comes_in_one_or_in_two() -> None:
    kinds = Counter(type(x) for x in toy(0).instructions if isinstance(x, LAUNCHES))
    assert kinds == {ReduceScatter: 2, GatherGradient: 2}
    kinds = Counter(type(x) for x in toy(0, native=True).instructions if isinstance(x, LAUNCHES))
    assert kinds == {AllReduce: 2}


def test_native_all_reduce_is_for_stage_0_alone() -> None:
    assert lines(toy(2, native=True)) == lines(toy(2))


def test_an_op_that_reads_two_buckets_waits_for_both() -> None:
    graph = dag_graph([Param(unit=0), Param(unit=1)], [Node(weights=(0, 1), through="itself")])
    program = toy(graph=graph)
    at = place(program, Run("f0"))
    assert program.instructions[at - 4 : at] == (Gather(0, "b0"), Wait(0), Gather(1, "b1"), Wait(1))


def test_buffers_constants_and_the_batch_are_residents() -> None:
    graph = dag_graph([Param()], [Node(buffer=0)], buffers=1)
    program = toy(graph=graph)
    assert program.entry == ("b0:part", "buffer0", "constant", "batch.0")
    assert program.exit == (*program.entry, "loss")
