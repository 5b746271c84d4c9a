import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.graphs import Layer, Node, Param, chain_graph, dag_graph, own
from zplan.graph.ir import Graph
from zplan.planner.fold import Row, fold, span, template
from zplan.planner.memory import Memory
from zplan.planner.ownership import Ownership
from zplan.planner.pipeline import build
from zplan.planner.plan import Plan, make_plan
from zplan.planner.program import LAUNCHES, Program, Run, Wait
from zplan.planner.rows import holds, make_rows, where
from zplan.planner.show import compare_text, schedule_text, summary_text
from zplan.planner.spec import make_spec
from zplan.planner.traffic import Traffic
from zplan.units import format_bytes

Golden = Callable[[str, str], None]
# Lines of a printed page.
PAGE = 66


def chain(depth: int, *, numel: int = 256) -> Graph:
    return chain_graph([Layer(numel=numel) for _ in range(depth)])


def plan(graph: Graph, *, stage: int = 3, world: int = 4, bucket: str = "1KiB", native: bool = False) -> Plan:
    spec = make_spec(stage=stage, world_size=world, bucket=bucket, device="cuda" if native else "cpu")
    return make_plan(graph, spec)


def rows_of(program: Program, *, ops: bool = False) -> list[Row]:
    return make_rows(program, Memory(program), Traffic(program), ops=ops)


def text_of(program: Program, *, ops: bool = False) -> str:
    return schedule_text(program, Memory(program), Traffic(program), ops=ops)


def odd_model() -> Graph:
    """Six layers of every sort: tied, frozen, unused, in a second group, at stages of their own."""
    layers = [Layer(numel=512), *(Layer(numel=300, group=i % 2) for i in range(4)), Layer(frozen=True), Layer(tied=0)]
    graph = chain_graph(layers)
    aliases = {"layers.0.weight": ("layers.0.weight", "layers.6.weight")}
    tensors = [replace(t, aliases=aliases.get(t.name, t.aliases)) for t in graph.tensors]
    unused = replace(tensors[1], name="spare", aliases=("spare",), module="", grad=None, group=0)
    values = {**graph.values, "spare": replace(graph.values["layers.1.weight"], name="spare", storage="spare")}
    return replace(
        graph,
        tensors=(*tensors, unused),
        values=values,
        stages={"layers.0": 0, "layers.2": 1, "layers.3": 1},
        optimizer=replace(graph.optimizer, assumed=True),
        notes=("layers.1 has a hint", "layers.2 has a hint", "the batch is an upper bound"),
    )


# Whole texts, read once by a person


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_schedule(golden: Golden, stage: int) -> None:
    golden(f"show/schedule-stage-{stage}", plan(chain(12), stage=stage).schedule.text() + "\n")


def test_schedule_with_ops(golden: Golden) -> None:
    golden("show/schedule-ops", plan(chain(2)).schedule.text(ops=True) + "\n")


def test_schedule_of_mixed_stages(golden: Golden) -> None:
    golden("show/schedule-mixed", plan(odd_model(), native=True).schedule.text() + "\n")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_summary(golden: Golden, world: int) -> None:
    golden(f"show/summary-world-{world}", summary_text(plan(odd_model(), world=world)) + "\n")


def test_compare(golden: Golden) -> None:
    golden("show/compare", compare_text([plan(chain(12), stage=stage) for stage in range(4)]) + "\n")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_texts_are_ascii_and_the_same_each_time(stage: int) -> None:
    def texts() -> str:
        made = plan(odd_model(), stage=stage)
        return "\n".join([str(made), str(made.schedule), made.schedule.text(ops=True), compare_text([made, made])])

    assert texts() == texts()
    assert texts().isascii()
    assert not re.search(r"[ \t]$", texts(), re.MULTILINE)


# Folding


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_page_at_any_depth(stage: int) -> None:
    few, many = (plan(chain(depth), stage=stage) for depth in (16, 80))
    assert str(few.schedule).count("\n") == str(many.schedule).count("\n") < PAGE
    assert str(few).count("\n") == str(many).count("\n") < PAGE


def test_two_buckets_a_layer_fold_with_their_own_steps() -> None:
    nodes = [Node(inputs=(-1,), weights=(2 * i, 2 * i + 1)) for i in range(10)]
    params = [Param(numel=256 + 256 * (i % 2), unit=i // 2) for i in range(20)]
    made = plan(dag_graph(params, nodes))
    assert re.search(r"\[ .* gather +b3,5\.\.17 = units\.1\.\.8\.p3,5\.\.17:fp32\[512\]", str(made.schedule))


def test_layers_that_send_other_bytes_do_not_fold() -> None:
    text = str(
        plan(
            chain_graph([Layer(numel=256 * (1 + i // 5)) for i in range(10)]),
        ).schedule
    )
    assert re.search(r"gather +b1\.\.4 = layers\.1\.\.4\.weight:fp32\[256\]", text)
    assert re.search(r"gather +b5\.\.9 = layers\.5\.\.9\.weight:fp32\[512\]", text)
    same_text = [row(i, sent=i % 2) for i in range(6)]
    assert all(block.period != 1 or block.times == 1 for block in fold(same_text))


def row(i: int, *, label: str = "b{}", detail: str = "", sent: int = 0, mark: str = "", verb: str = "run") -> Row:
    return Row(i, i, "", verb, label.format(i), detail, sent, i, mark)


def shape(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    return [(block.start, block.period, block.times) for block in fold(rows)]


def test_what_folds_and_what_does_not() -> None:
    assert shape([row(i) for i in range(5)]) == [(0, 1, 5)]
    assert shape([row(i) for i in range(2)]) == [(0, 1, 1), (1, 1, 1)]
    assert shape([row(i, label=f"b{2 * i}") for i in range(5)]) == [(0, 1, 5)]
    assert shape([row(i, label=f"b{i * i}") for i in range(3)]) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    assert shape([row(i, detail=f" ({i} ops)") for i in range(3)]) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    assert shape([row(i, mark="<- peak" if i == 3 else "") for i in range(7)]) == [(0, 1, 3), (3, 1, 1), (4, 1, 3)]
    assert shape([replace(row(i), flight="|" * (i % 2)) for i in range(3)]) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    pairs = [row(i, label=f"b{i // 2}", verb=("wait", "free")[i % 2]) for i in range(8)]
    assert shape([row(0, verb="pack"), *pairs]) == [(0, 1, 1), (1, 2, 4)]


@given(st.lists(st.tuples(st.sampled_from(["run", "wait"]), st.integers(0, 3), st.integers(0, 1)), max_size=40))
def test_blocks_stand_for_exactly_what_they_replace(drawn: list[tuple[str, int, int]]) -> None:
    rows = [row(i, verb=verb, label=f"b{number}", sent=sent) for i, (verb, number, sent) in enumerate(drawn)]
    at = 0
    for block in fold(rows):
        assert block.start == at
        for i in range(at, at + block.period):
            repeats = [rows[i + j * block.period] for j in range(block.times)]
            numbers = [int(each.label[1:]) for each in repeats]
            assert len({(each.verb, each.sent) for each in repeats}) == 1
            assert len({b - a for a, b in pairwise(numbers)}) <= 1
        at += block.period * block.times
    assert at == len(rows)


def test_numbers_that_do_not_count_are_listed_or_starred() -> None:
    assert span(["b0", "b1", "b5"]) == "b0,1,5"
    assert span(["b0", "b1", "b5", "b6"]) == "b*"
    assert span(["b7"]) == span(["b7", "b7"]) == "b7"
    assert template("b12:grad") == "b#:grad"


# Rows


@pytest.mark.parametrize("ops", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_cover_every_instruction_once(stage: int, ops: bool) -> None:
    program = plan(odd_model(), stage=stage).program
    covered = [i for row in rows_of(program, ops=ops) for i in range(row.first, row.last + 1)]
    assert covered == list(range(len(program.instructions)))
    if ops:
        assert len(covered) == len(rows_of(program, ops=True))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_signs_count_the_collectives_in_flight(stage: int) -> None:
    program = plan(odd_model(), stage=stage).program
    flying = 0
    for each in rows_of(program):
        instruction = program.instructions[each.first]
        ends = isinstance(instruction, Wait)
        starts = isinstance(instruction, LAUNCHES)
        flying -= ends
        assert each.flight == "|" * flying + "<" * ends + ">" * starts
        flying += starts
    assert flying == 0


@pytest.mark.parametrize("ops", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_peak_is_marked_once_with_its_bytes(stage: int, ops: bool) -> None:
    made = plan(chain(12), stage=stage)
    lines = made.schedule.text(ops=ops).splitlines()
    peak = re.search(r" peak=(\S+ \S+) ", lines[0])
    marked = [line for line in lines if "<- peak" in line]
    assert peak is not None
    assert len(marked) == 1
    assert f" {peak[1]} <- peak" in marked[0]


def test_a_peak_inside_a_folded_run_names_the_op() -> None:
    graph = chain(3)
    ops = tuple(replace(op, workspace=10**6) if op.name == "f1" else op for op in graph.ops)
    program = plan(replace(graph, ops=ops), world=1).program
    (marked,) = [row for row in rows_of(program) if row.mark]
    assert marked.first < Memory(program).peak_index <= marked.last
    assert marked.mark == f"<- peak at {Memory(program).peak_index} f1"


def test_live_bytes_are_those_after_the_row() -> None:
    program = plan(chain(3)).program
    memory = Memory(program)
    assert all(row.live == memory.timeline[row.last] for row in rows_of(program) if not row.mark)


def test_a_second_run_of_a_forward_op_is_a_recompute() -> None:
    program = plan(chain(3), world=1).program
    index = program.instructions.index(Run("dx1"))
    again = (*program.instructions[:index], Run("f1"), *program.instructions[index:])
    assert "layers.1 recompute" in [row.label for row in rows_of(program.with_(again))]


def test_ops_of_no_module_count_as_those_around_them() -> None:
    graph = chain(3)

    def with_root(*names: str) -> list[str]:
        ops = tuple(replace(op, module="") if op.name in names else op for op in graph.ops)
        return [row.text for row in rows_of(build(replace(graph, ops=ops), own(graph, world=1)))]

    nested = replace(graph, ops=tuple(replace(op, module=op.module and f"{op.module}.attn.q") for op in graph.ops))
    assert with_root() == [row.text for row in rows_of(build(nested, own(graph, world=1)))]
    joined = replace(graph, ops=tuple(replace(op, module=op.module and "layers.0") for op in graph.ops))
    rows = [row.text for row in rows_of(build(joined, own(graph, world=1)))]
    assert rows[:3] == ["layers.0 forward (6 ops)", "(root) forward (1 op)", "(root) backward (1 op)"]
    assert with_root("f1")[1:4] == ["layers.1 forward (1 op)", "(root) forward (1 op)", "layers.2 forward (2 ops)"]
    between = replace(joined, ops=tuple(replace(op, module="" if op.name == "f1" else op.module) for op in joined.ops))
    assert [row.text for row in rows_of(build(between, own(graph, world=1)))] == rows


def test_a_view_of_a_parameter_that_no_module_made_counts_as_the_parameters_unit() -> None:
    graph = chain(3)
    ops = tuple(replace(op, module="" if op.name == "t1" else op.module) for op in graph.ops)
    bare, plain = (build(each, own(graph, world=1)) for each in (replace(graph, ops=ops), graph))
    assert [row.text for row in rows_of(bare)] == [row.text for row in rows_of(plain)]


def test_owners_of_folded_tensors() -> None:
    def line(graph: Graph, bucket: str = "1KiB") -> str:
        lines = str(plan(graph, world=2, bucket=bucket)).splitlines()
        return next(line for line in lines if line.startswith("layers."))

    assert " r0 [0:128) r1 [128:256) " in line(chain(4))
    assert " 1 of r0-r1 each " in line(chain(4), "4KiB")
    assert " 1-2 of r0-r1 each " in line(chain(3), "4KiB")
    assert " empty " in line(chain(3, numel=0))
    assert " b0      r0     default" in line(chain(1, numel=64))


def test_why_a_tensor_gets_no_gradient() -> None:
    (tensor,) = chain(1).tensors
    graph = replace(chain(1), tensors=(replace(tensor, grad=None, group=None),))
    assert "default: stage 3; in no optimizer group\n" in str(plan(graph))
    frozen = replace(graph, tensors=(replace(graph.tensors[0], trainable=False),))
    assert "default: stage 3; frozen\n" in str(plan(frozen))


def test_what_a_bucket_holds() -> None:
    def held(ownership: Ownership) -> list[tuple[str, str]]:
        return [holds(bucket) for bucket in ownership.buckets]

    four = chain(4)
    assert held(own(four, world=2))[1] == ("layers.1.weight", ":fp32[256]")
    assert held(own(four, world=2, bucket_nbytes=2048))[1] == ("layers.2..3", " (2 tensors, 2 KiB)")
    apart = dag_graph([Param(unit=u) for u in (0, 2, 4, 6)], [Node(weights=(i,)) for i in range(4)])
    assert held(own(apart, world=2, bucket_nbytes=10**6)) == [("units.0, ..., units.6", " (4 tensors, 4 KiB)")]
    block = dag_graph([Param(), Param()], [Node(weights=(0, 1))])
    assert held(own(block, world=2, bucket_nbytes=10**6)) == [("units.0.*", " (2 tensors, 2 KiB)")]


def test_where() -> None:
    program = plan(chain(2)).program
    index = program.instructions.index(Run("f1"))
    assert where(program, index) == f"{index} run f1 (test.compute in layers.1, forward)"
    assert where(program, 0) == "0 gather b0 = layers.0.weight:fp32[256]"
    assert where(program, -1) == "at rest, between steps"


# Facts of the texts


def test_headers() -> None:
    made = plan(odd_model())
    resident, peak, sent = map(
        format_bytes, (made.memory.resident_bytes, made.memory.peak_bytes, made.traffic.bytes_per_rank)
    )
    assert str(made.schedule).startswith(
        f"world=4 stage=mixed position=only resident={resident} peak={peak} sent={sent}\n"
    )
    assert str(plan(chain(2), stage=2).schedule).startswith("world=4 stage=2 ")
    assert str(made).startswith(f"plan {made.hash}: world=4 stage=mixed device=cpu bucket=1 KiB prefetch=1 depth=2\n")


def test_nothing_is_sent_in_a_world_of_one() -> None:
    made = plan(chain(2), world=1)
    assert str(made.schedule).endswith("\nnothing is sent")
    assert str(made).endswith("\n\ntraffic: nothing is sent")
    assert ">" not in re.sub("->", "", str(made.schedule))


@pytest.mark.parametrize(("stage", "sent"), [(0, "2.00 psi"), (1, "2.00 psi"), (2, "2.00 psi"), (3, "3.00 psi")])
def test_traffic_in_psi(stage: int, sent: str) -> None:
    assert f"({sent}), of it padding 0 B" in str(plan(chain(4), stage=stage))


def test_the_note_on_stage_1_needs_both_stages() -> None:
    plans = [plan(chain(4), stage=stage) for stage in range(4)]
    assert "stage 1 gives gradients back bucket by bucket" in compare_text(plans)
    assert "stage 1 gives" not in compare_text([plans[0], plans[1], plans[3]])


def test_a_model_without_parameters() -> None:
    graph = replace(chain(1), tensors=(), ops=(), outputs=())
    made = plan(graph)
    assert "stage=none" in str(made)
    assert "stage=none" in str(made.schedule)


def test_a_very_long_row_pushes_only_its_own_bytes_to_the_right() -> None:
    graph = chain(2)
    ops = tuple(replace(op, literals="[64], " * 40) if op.name == "f1" else op for op in graph.ops)
    lines = plan(replace(graph, ops=ops)).schedule.text(ops=True).splitlines()
    assert [len(line) > 140 for line in lines if "KiB" in line].count(True) == 1
