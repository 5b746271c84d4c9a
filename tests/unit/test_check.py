"""Each law: a valid program, broken in that law alone, is refused by its number, with the place."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.graphs import Layer, Node, Param, chain_graph, dag_graph, own, with_masters
from zplan.errors import CheckError
from zplan.graph.ir import Graph
from zplan.planner.check import check
from zplan.planner.keep import keep
from zplan.planner.lower import lower
from zplan.planner.prefetch import prefetch
from zplan.planner.program import (
    Accumulate,
    AllReduce,
    Caps,
    Cast,
    Free,
    Gather,
    GatherGradient,
    Instruction,
    Pack,
    Position,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
)
from zplan.planner.sink_waits import sink_waits

TWO = chain_graph([Layer(), Layer()])


def toy(stage: int = 3, *, graph: Graph = TWO, world: int = 2, native: bool = False) -> Program:
    return lower(graph, own(graph, world=world, stage=stage), native=native)


def at(program: Program, instruction: Instruction, nth: int = 0) -> int:
    return [i for i, x in enumerate(program.instructions) if x == instruction][nth]


def without(program: Program, *gone: Instruction, nth: int = 0) -> Program:
    for instruction in gone:
        index = at(program, instruction, nth)
        program = program.with_((*program.instructions[:index], *program.instructions[index + 1 :]))
    return program


def insert(program: Program, index: int, *new: Instruction) -> Program:
    return program.with_((*program.instructions[:index], *new, *program.instructions[index:]))


def before(program: Program, anchor: Instruction, *new: Instruction, nth: int = 0) -> Program:
    return insert(program, at(program, anchor, nth), *new)


def after(program: Program, anchor: Instruction, *new: Instruction, nth: int = 0) -> Program:
    return insert(program, at(program, anchor, nth) + 1, *new)


def move(program: Program, *moved: Instruction, ahead_of: Instruction, nth: int = 0) -> Program:
    return before(without(program, *moved, nth=nth), ahead_of, *moved)


def end(program: Program, *new: Instruction) -> Program:
    return program.with_((*program.instructions, *new))


def change(program: Program, old: Instruction, new: Instruction) -> Program:
    return without(before(program, old, new), old)


def refused(law: int, program: Program, words: str) -> str:
    """Asserts that the law, these words, and the place are in the error; returns its text."""
    with pytest.raises(CheckError) as caught:
        check(program)
    text = str(caught.value)
    assert text.startswith(f"law {law}: ")
    assert words in text.splitlines()[0]
    assert text.endswith("This is a fault of zplan: please report it.")
    return text


Broken = Callable[[], Program]


def draws() -> Graph:
    """Two dropouts and a loss."""
    return chain_graph([Layer(random=True), Layer(random=True)])


def buffered() -> Graph:
    """An op that reads a buffer, which is written behind it, and one that reads it then."""
    nodes = [Node(buffer=0), Node(buffer=0, weights=())]
    return dag_graph([Param()], nodes, buffers=1)


def frozen() -> Graph:
    return chain_graph([Layer(), Layer(frozen=True)])


# Valid programs


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("graph", [TWO, draws(), buffered(), frozen()], ids=["two", "draws", "buffered", "frozen"])
def test_valid_programs_come_back_as_they_are(stage: int, world: int, graph: Graph) -> None:
    program = toy(stage, graph=graph, world=world)
    for step in (
        lambda p: p,
        keep,
        lambda p: prefetch(p, distance=2),
        lambda p: sink_waits(p, depth=2),
    ):
        program = step(program)
        assert check(program) is program


def test_a_recompute_is_valid() -> None:
    program = without(toy(0), Free("y0"))
    program = after(program, Run("f1"), Free("y0"))
    program = before(program, Run("dw1"), Run("t0"), Run("f0"), Free("t0"))
    check(after(program, Run("dw1"), Free("y0")))


def test_a_model_without_gradients_is_valid() -> None:
    check(toy(3, graph=chain_graph([Layer(frozen=True)])))


# Law 1


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(
            lambda: move(toy(), Wait(0), ahead_of=Free("t0")),
            "layers.0.weight is read while collective 0 is in flight",
            id="whole-in-flight",
        ),
        pytest.param(
            lambda: without(toy(), Gather(0, "b0"), Wait(0)),
            "layers.0.weight is read, but is not whole",
            id="never-gathered",
        ),
        pytest.param(
            lambda: without(toy(), Gather(5, "b0"), Wait(5)),
            "layers.0.weight is read, but is not whole",
            id="not-gathered-again",
        ),
        pytest.param(lambda: without(toy(), Run("f0")), "y0 is read, but is not alive", id="op-left-out"),
        pytest.param(lambda: without(toy(), Run("t0")), "t0 is read, but is not alive", id="view-left-out"),
        pytest.param(
            lambda: move(toy(), Run("f1"), ahead_of=Run("f0")), "y0 is read, but is not alive", id="too-early"
        ),
        pytest.param(lambda: without(toy(), Run("dw0")), "dw0 is read, but is not alive", id="gradient-left-out"),
        pytest.param(lambda: move(toy(), Pack("b1"), ahead_of=Run("d")), "dw1 is read", id="packed-too-early"),
        pytest.param(lambda: without(toy(), Pack("b1")), "b1:flat is read, but is not alive", id="never-packed"),
        pytest.param(
            lambda: end(without(toy(), Wait(4), Free("b0:flat")), Wait(4), Free("b0:flat")),
            "b0:grad is read while collective 4 is in flight",
            id="gradient-in-flight",
        ),
        pytest.param(
            lambda: without(toy(0), GatherGradient(1, "b1"), Wait(1)),
            "b1:total is read, but is not alive",
            id="half-an-all-reduce",
        ),
        pytest.param(
            lambda: change(toy(2), ReduceScatter(4, "b0"), AllReduce(4, "b0")),
            "b0:grad is read, but is not alive",
            id="another-reduction",
        ),
        pytest.param(lambda: before(toy(), Run("d"), Run("nothing")), "there is no op nothing", id="unknown-op"),
    ],
)
def test_law_1(broken: Broken, words: str) -> None:
    refused(1, broken(), words)


def _update_early(stage: int, anchor: Instruction, nth: int) -> Program:
    program = without(toy(stage), Update(("b0", "b1")))
    return before(program, anchor, Update(("b0", "b1")), nth=nth)


def test_law_1_no_op_reads_what_the_update_wrote() -> None:
    refused(1, _update_early(0, Run("t0"), 1), "layers.0.weight is read after the update of b0")


def test_law_1_no_op_reads_a_view_of_what_the_update_wrote() -> None:
    refused(1, _update_early(0, Run("dx0"), 0), "t0 is read after the update of b0")


def test_law_1_no_gather_takes_what_the_update_wrote() -> None:
    refused(1, _update_early(3, Gather(5, "b0"), 0), "b0:part is read after the update of b0")


def test_law_1_no_gather_reads_while_the_update_writes() -> None:
    refused(1, _update_early(3, Wait(5), 0), "b0:part is updated while collective 5 reads it")


# Law 2


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(lambda: after(toy(), Wait(0), Wait(0)), "collective 0 is waited for twice", id="waited-for-twice"),
        pytest.param(
            lambda: before(toy(), Wait(0), Wait(9)),
            "collective 9 is waited for but never launched",
            id="never-launched",
        ),
        pytest.param(
            lambda: end(toy(graph=frozen()), Gather(9, "b1")),
            "collective 9 is never waited for",
            id="never-waited-for",
        ),
        pytest.param(
            lambda: change(toy(), Gather(1, "b1"), Gather(0, "b1")), "collective 0 is launched twice", id="same-number"
        ),
    ],
)
def test_law_2(broken: Broken, words: str) -> None:
    refused(2, broken(), words)


# Law 3


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(
            lambda: change(toy(), Update(("b0", "b1")), Update(("b0",))),
            "the gradients of b1 never reach the update",
            id="left-out",
        ),
        pytest.param(
            lambda: without(toy(), Update(("b0", "b1"))), "the gradients of b0 never reach the update", id="no-update"
        ),
        pytest.param(
            lambda: change(toy(), Update(("b0", "b1")), Update(("b0", "b0", "b1"))),
            "b0 is updated twice",
            id="twice-in-one-update",
        ),
        pytest.param(
            lambda: after(toy(), Update(("b0", "b1")), Update(("b0", "b1"))), "the update comes twice", id="two-updates"
        ),
        pytest.param(
            lambda: change(after(toy(), Update(("b0", "b1")), Update(("b1",))), Update(("b0", "b1")), Update(("b0",))),
            "the update comes twice",
            id="update-in-two",
        ),
        pytest.param(
            lambda: before(toy(), Free("b0:flat"), ReduceScatter(6, "b0")),
            "the gradients of b0 are reduced twice",
            id="reduced-twice",
        ),
        pytest.param(
            lambda: before(toy(), Free("dw0"), Pack("b0")), "the gradients of b0 are packed twice", id="packed-twice"
        ),
        pytest.param(
            lambda: _update_early(3, Pack("b0"), 0), "b0 is updated before its gradients are reduced", id="not-reduced"
        ),
        pytest.param(
            lambda: before(without(toy(world=1), Update(("b0", "b1"))), Pack("b0"), Update(("b0", "b1"))),
            "b0 is updated before its gradients are reduced",
            id="not-packed",
        ),
    ],
)
def test_law_3(broken: Broken, words: str) -> None:
    refused(3, broken(), words)


# Law 4


def _whole_with_view(view: str) -> Program:
    """At stage 2, kept: the bucket is freed while a view of it, made in forward, is read in backward."""
    return move(toy(2), Free("b0:whole"), ahead_of=Free(view))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(lambda: after(toy(), Free("y1"), Free("y1")), "y1 is freed, but is not alive", id="freed-twice"),
        pytest.param(lambda: before(toy(), Run("f0"), Free("y1")), "y1 is freed, but is not alive", id="not-made"),
        pytest.param(
            lambda: before(toy(), Run("t0"), Free("layers.0.weight")),
            "layers.0.weight is freed, but is not alive",
            id="parameter-itself",
        ),
        pytest.param(
            lambda: before(toy(), Wait(0), Free("b0:whole")), "b0:whole is freed, but is not alive", id="in-flight"
        ),
        pytest.param(
            lambda: _whole_with_view("t0"), "b0:whole is freed while its view t0 is alive", id="whole-under-its-view"
        ),
        pytest.param(
            lambda: move(toy(), Free("b0:flat"), ahead_of=Wait(4)),
            "b0:flat is freed while collective 4 reads it",
            id="read-by-a-collective",
        ),
        pytest.param(
            lambda: move(toy(0), Free("b1:grad"), ahead_of=Wait(1)),
            "b1:grad is freed while collective 1 reads it",
            id="read-by-a-gather",
        ),
        pytest.param(
            lambda: before(toy(), Wait(0), Free("b0:part")),
            "b0:part is freed while collective 0 reads it",
            id="part-read-by-a-gather",
        ),
        pytest.param(
            lambda: before(toy(), Run("f0"), Run("t0")), "t0 is made while it is there already", id="made-twice"
        ),
        pytest.param(
            lambda: before(toy(), Run("t0"), Gather(1, "b0")), "b0:whole is made while it is there", id="gathered-twice"
        ),
        pytest.param(
            lambda: replace(before(toy(), Wait(0), Gather(1, "b0")), caps=Caps(2, 1)),
            "b0:whole is made while it is there",
            id="gathered-twice-in-flight",
        ),
    ],
)
def test_law_4(broken: Broken, words: str) -> None:
    refused(4, broken(), words)


def test_law_4_used_after_its_free() -> None:
    refused(1, move(toy(), Free("y0"), ahead_of=Run("dw1")), "y0 is read, but is not alive")


# Law 5


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(lambda: without(toy(), Free("y1")), "y1 is left at exit", id="activation-left"),
        pytest.param(lambda: without(toy(), Free("b0:flat")), "b0:flat is left at exit", id="flat-left"),
        pytest.param(lambda: without(toy(), Free("b0:grad")), "b0:grad is left at exit", id="gradient-left"),
        pytest.param(lambda: without(toy(), Free("b0:whole"), nth=1), "b0:whole is left at exit", id="whole-left"),
        pytest.param(lambda: end(toy(), Free("b0:part")), "b0:part should be there at exit", id="resident-freed"),
        pytest.param(
            lambda: end(toy(0), Free("b0:whole")), "b0:whole should be there at exit", id="whole-resident-freed"
        ),
        pytest.param(lambda: end(toy(), Free("batch.0")), "batch.0 should be there at exit", id="batch-freed"),
        pytest.param(lambda: end(toy(), Free("loss")), "loss should be there at exit", id="output-freed"),
        pytest.param(
            lambda: replace(toy(), entry=(*toy().entry, "b0:whole")),
            "b0:whole is declared at entry",
            id="whole-at-entry",
        ),
        pytest.param(
            lambda: replace(toy(), entry=toy().entry[1:]), "b0:part is missing at entry", id="no-part-at-entry"
        ),
        pytest.param(
            lambda: replace(without(toy(), Free("b0:whole"), nth=1), exit=(*toy().exit, "b0:whole")),
            "b0:whole is declared at exit",
            id="whole-at-exit",
        ),
        pytest.param(
            lambda: replace(end(toy(), Free("loss")), exit=toy().exit[:-1]), "loss is missing at exit", id="no-output"
        ),
    ],
)
def test_law_5(broken: Broken, words: str) -> None:
    refused(5, broken(), words)


def twice(program: Program, instruction: Instruction) -> Program:
    """The instruction, and again right after it."""
    index = program.instructions.index(instruction)
    return program.with_((*program.instructions[: index + 1], instruction, *program.instructions[index + 1 :]))


def several(position: Position, stage: int = 2) -> Program:
    return lower(TWO, own(TWO, world=2, stage=stage), position=position)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("position", [Position.FIRST, Position.MIDDLE, Position.LAST])
def test_programs_of_micro_batches_are_valid(position: Position, stage: int) -> None:
    check(keep(check(several(position, stage))))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda: replace(several(Position.FIRST), exit=toy(2).exit), "b0:acc is missing at exit"),
        (lambda: replace(several(Position.LAST), entry=toy(2).entry), "b0:acc is missing at entry"),
        (lambda: replace(several(Position.LAST), exit=several(Position.MIDDLE).exit), "b0:acc is declared at exit"),
        (
            lambda: replace(keep(several(Position.FIRST, 3)), exit=(*several(Position.FIRST, 3).exit, "b0:whole")),
            "b0:w",
        ),
        (lambda: without(several(Position.LAST), Free("b0:acc")), "b0:acc is left at exit"),
    ],
)
def test_law_5_between_micro_batches(broken: Broken, words: str) -> None:
    refused(5, broken(), words)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda: without(several(Position.MIDDLE), Accumulate("b0")), "the gradients of b0 are never added up"),
        (lambda: without(several(Position.LAST), Accumulate("b0")), "b0 is updated before its micro-batches are added"),
        (lambda: twice(several(Position.MIDDLE), Accumulate("b0")), "the gradients of b0 are added up twice"),
        (
            lambda: replace(toy(2), instructions=(*toy(2).instructions[:-1], Accumulate("b0"))),
            "the gradients of b0 are added up, but",
        ),
        (lambda: without(several(Position.LAST, 1), Accumulate("b0")), "b0 are reduced before micro-batches are added"),
    ],
)
def test_law_3_over_micro_batches(broken: Broken, words: str) -> None:
    refused(3, broken(), words)


def test_law_3_no_update_before_the_last_micro_batch() -> None:
    program = several(Position.LAST)
    middle = replace(program, position=Position.MIDDLE, exit=several(Position.MIDDLE).exit)
    refused(3, middle, "the update comes in a program for the middle micro-batch")
    early = several(Position.LAST, 1)
    refused(
        3,
        replace(early, position=Position.MIDDLE, exit=several(Position.MIDDLE, 1).exit),
        "are reduced before the last micro-batch",
    )


# Law 6


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(
            lambda: change(change(toy(), Gather(0, "b0"), Gather(9, "b0")), Wait(0), Wait(9)),
            "collective 1 is launched after 9",
            id="gathers",
        ),
        pytest.param(
            lambda: change(change(toy(), ReduceScatter(2, "b1"), ReduceScatter(9, "b1")), Wait(2), Wait(9)),
            "collective 4 is launched after 9",
            id="reductions",
        ),
        pytest.param(
            lambda: change(change(toy(0), GatherGradient(1, "b1"), GatherGradient(9, "b1")), Wait(1), Wait(9)),
            "collective 3 is launched after 9",
            id="gathers-of-gradients",
        ),
    ],
)
def test_law_6(broken: Broken, words: str) -> None:
    refused(6, broken(), words)


def test_law_6_reordered_gathers() -> None:
    program = replace(toy(), caps=Caps(2, 1))
    refused(6, move(program, Gather(1, "b1"), ahead_of=Gather(0, "b0")), "collective 0 is launched after 1")


# Law 7


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(
            lambda: before(toy(0, graph=draws()), Run("loss"), Free("y1"), Run("t1"), Run("f1"), Free("t1")),
            "random op f1 (test.random) runs twice",
            id="drawn-twice",
        ),
        pytest.param(
            lambda: end(toy(graph=buffered()), Run("write1")),
            "write op write1 (test.write) runs twice",
            id="written-twice",
        ),
        pytest.param(
            lambda: without(toy(graph=buffered()), Run("write1")),
            "write op write1 (test.write) never runs",
            id="write-left-out",
        ),
        pytest.param(
            lambda: move(toy(graph=buffered()), Run("write0"), ahead_of=Free("new1")),
            "comes after 0 writes of buffer0, in the graph after 1",
            id="write-too-late",
        ),
        pytest.param(
            lambda: move(toy(graph=buffered()), Run("f1"), ahead_of=Run("write0")),
            "f1 (test.compute) comes after 0 writes of buffer0, in the graph after 1",
            id="read-too-early",
        ),
        pytest.param(
            lambda: _recomputed_behind_a_write(),
            "new0 (test.compute) comes after 2 writes of buffer0, in the graph after 0",
            id="recomputed-behind-a-write",
        ),
        pytest.param(
            lambda: without(toy(graph=_unread()), Run("f0"), Free("y0_0"), Free("y0_1")),
            "compute op f0 (test.compute) never runs",
            id="unread-op-left-out",
        ),
        pytest.param(
            lambda: move(toy(0, graph=_two_draws()), Run("f1"), ahead_of=Run("f0")),
            "f1 (test.random) comes after 0 draws, in the graph after 1",
            id="drawn-in-another-order",
        ),
    ],
)
def test_law_7(broken: Broken, words: str) -> None:
    refused(7, broken(), words)


def _unread() -> Graph:
    return dag_graph([Param()], [Node(outputs=2, weights=()), Node(inputs=(0,))])


def _two_draws() -> Graph:
    return dag_graph([Param()], [Node(random=True, weights=()), Node(random=True, weights=(), inputs=(0,))])


def _recomputed_behind_a_write() -> Program:
    program = toy(graph=buffered())
    return before(program, Run("d"), Run("new0"), Free("new0"))


# Law 8


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(
            lambda: without(without(toy(), Free("b0:whole")), Gather(5, "b0"), Wait(5)),
            "b0:whole crosses from forward to backward, and b0 is at stage 3",
            id="whole",
        ),
        pytest.param(
            lambda: without(toy(graph=chain_graph([Layer(cast=True), Layer()])), Free("t0")),
            "t0 crosses from forward to backward, and b0 is at stage 3",
            id="cast",
        ),
        pytest.param(
            lambda: move(toy(), Gather(3, "b1"), ahead_of=Run("loss")),
            "b1:whole is in flight from forward to backward",
            id="in-flight",
        ),
        pytest.param(
            lambda: move(toy(graph=_aux()), Run("f1"), Free("y1_0"), ahead_of=Run("b0")),
            "forward op f1 runs after backward op d",
            id="forward-op-behind-backward",
        ),
    ],
)
def test_law_8(broken: Broken, words: str) -> None:
    refused(8, broken(), words)


def test_law_8_is_for_stage_3_alone() -> None:
    for stage in (1, 2):
        check(keep(toy(stage)))
        check(without(without(toy(stage), Free("b0:whole")), Gather(5, "b0"), Wait(5)))


def _aux() -> Graph:
    """A forward op that backward does not need."""
    nodes = [Node(), Node(weights=(), saved=False), Node(inputs=(0,), weights=(), saved=False)]
    return dag_graph([Param()], nodes)


# Law 9


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(
            lambda: before(toy(graph=frozen()), Update(("b0",)), Pack("b1")),
            "the parameters of b1 get no gradients",
            id="packed",
        ),
        pytest.param(
            lambda: before(toy(graph=frozen()), Update(("b0",)), ReduceScatter(9, "b1"), Wait(9)),
            "the parameters of b1 get no gradients",
            id="reduced",
        ),
        pytest.param(
            lambda: change(toy(graph=frozen()), Update(("b0",)), Update(("b0", "b1"))),
            "the parameters of b1 get no gradients",
            id="updated",
        ),
        pytest.param(
            lambda: _half_frozen(), "layers.1.weight gets no gradient, but b0 is packed", id="one-of-a-bucket"
        ),
    ],
)
def test_law_9(broken: Broken, words: str) -> None:
    refused(9, broken(), words)


def _half_frozen() -> Program:
    """A graph in which one of the bucket's tensors gets no gradient any more."""
    ownership = own(TWO, world=2, bucket_nbytes=1 << 20)
    tensors = tuple(replace(t, grad=None) if t.name == "layers.1.weight" else t for t in TWO.tensors)
    program = lower(TWO, ownership)
    return replace(program, graph=replace(TWO, tensors=tensors))


# Law 10


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        pytest.param(
            lambda: move(toy(), Gather(1, "b1"), ahead_of=Wait(0)),
            "2 gathers are in flight, the cap is 1",
            id="gathers",
        ),
        pytest.param(
            lambda: move(toy(), Wait(2), Free("b1:flat"), ahead_of=Update(("b0", "b1"))),
            "2 reductions are in flight, the cap is 1",
            id="reductions",
        ),
        pytest.param(
            lambda: replace(sink_waits(toy(0, graph=chain_graph([Layer()] * 5)), depth=2), caps=Caps(1, 3)),
            "4 reductions are in flight, the cap is 3",
            id="both-halves-of-an-all-reduce",
        ),
    ],
)
def test_law_10(broken: Broken, words: str) -> None:
    refused(10, broken(), words)


# The words


def test_the_excerpt_shows_the_place_and_what_is_around() -> None:
    text = refused(1, without(toy(), Gather(1, "b1"), Wait(1)), "layers.1.weight is read, but is not whole")
    assert text.splitlines()[1:-1] == [
        "       1 Wait(id=0)",
        "       2 Run(op='t0')",
        "       3 Run(op='f0')",
        "       4 Free(value='t0')",
        "       5 Free(value='b0:whole')",
        "-->    6 Run(op='t1')",
        "       7 Run(op='f1')",
        "       8 Free(value='t1')",
        "       9 Free(value='b1:whole')",
        "      10 Run(op='loss')",
    ]


def test_the_excerpt_at_the_end_shows_the_last_instructions() -> None:
    text = refused(5, without(toy(), Free("y1")), "y1 is left at exit")
    assert "-->" not in text
    assert "Free(value='b1:grad')" in text


LOW = with_masters(chain_graph([Layer(dtype="bf16"), Layer(dtype="bf16")]))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_programs_with_masters_are_valid(stage: int, world: int) -> None:
    program = check(sink_waits(prefetch(keep(toy(stage, graph=LOW, world=world)), distance=1), depth=2))
    assert sum(isinstance(x, Cast) for x in program.instructions) == (4 if stage == 3 else 2)


@pytest.mark.parametrize(
    ("law", "broken", "words"),
    [
        (1, lambda: without(toy(graph=LOW), Cast("b0")), "b0:part is read, but is not alive"),
        (
            1,
            lambda: after(toy(graph=LOW), Update(("b0", "b1")), Cast("b0")),
            "b0:master is read after the update of b0",
        ),
        (1, lambda: before(toy(), Gather(0, "b0"), Cast("b0")), "b0:master is read, but is not alive"),
        (4, lambda: twice(toy(graph=LOW), Cast("b0")), "b0:part is made while it is there already"),
        (4, lambda: after(toy(graph=LOW), Gather(0, "b0"), Free("b0:part")), "b0:part is freed while collective 0"),
        (4, lambda: without(toy(graph=LOW), Free("b0:part")), "b0:part is made while"),
        (5, lambda: without(toy(graph=LOW), Free("b0:part"), nth=1), "b0:part is left at exit"),
        (8, lambda: without(toy(graph=LOW, world=1), Free("b0:whole")), "b0:whole crosses from forward to backward"),
    ],
)
def test_laws_of_masters(law: int, broken: Broken, words: str) -> None:
    refused(law, broken(), words)
