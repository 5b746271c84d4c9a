"""Check: the laws of a valid program, walked instruction by instruction.

1  every value read is whole, not in flight, and no parameter is read once the update has written it
2  every collective is waited for exactly once
3  every gradient reaches the update reduced, exactly once, and there is one update; those of micro-batches but the
   last are added up, exactly once each
4  nothing is freed twice, used after its free, or freed while a view of it is alive
5  at entry exactly the residents of the buckets are there, at exit the same and the outputs; between micro-batches
   the sums so far too, and what is kept whole
6  collectives have one order: within a kind, ids rise from launch to launch
7  no op is left out; random ops and ops that write a buffer run once, in the order of the graph, and a buffer is
   read on that side of its writes where the graph reads it
8  forward runs before backward, and at stage 3 nothing whole of a parameter crosses from one to the other
9  frozen and unused parameters have no gradient traffic
10 gathers and reductions in flight stay within their caps
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from zplan.errors import CheckError
from zplan.graph.ir import Graph, Op, OpKind, Phase
from zplan.planner.program import (
    Accumulate,
    AllReduce,
    Cast,
    Free,
    Gather,
    GatherGradient,
    Instruction,
    Launch,
    Pack,
    Position,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
    acc,
    adds,
    adds_first,
    cast,
    flat,
    gradient,
    held,
    is_chain,
    makes,
    master,
    takes,
    whole,
)

EXCERPT = 5


def check(program: Program) -> Program:
    """Returns the program as it is, or raises `CheckError` with the law, the instruction and those around it."""
    walk = _Walk(program)
    walk.begin()
    for index, instruction in enumerate(program.instructions):
        walk.index = index
        if index == program.boundary:
            walk.border()
        walk.step(instruction)
    walk.index = len(program.instructions)
    if program.boundary == walk.index:
        walk.border()
    walk.end()
    return program


@dataclass
class _Walk:
    """What holds before the instruction at `index`."""

    program: Program
    index: int = 0
    live: set[str] = field(default_factory=set)
    flying: dict[int, Launch] = field(default_factory=dict)
    launched: dict[int, type] = field(default_factory=dict)
    newest: dict[type, int] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    packed: set[str] = field(default_factory=set)
    added: set[str] = field(default_factory=set)
    reduced: set[str] = field(default_factory=set)
    updated: set[str] = field(default_factory=set)
    views: dict[str, set[str]] = field(default_factory=dict)
    effects: "_Effects" = field(init=False)
    due: Mapping[str, Mapping[str, int]] = field(init=False)
    backward: str = ""

    def __post_init__(self) -> None:
        self.live.update(self.program.entry)
        self.effects = _Effects(self.program.graph)
        self.due = _due(self.program.graph)

    def begin(self) -> None:
        """Names, and law 5 at entry. Between micro-batches sums are held, and what is kept whole may be."""
        program = self.program
        for self.index, instruction in enumerate(program.instructions):
            if isinstance(instruction, Run) and instruction.op not in program.graph.op:
                self.fail(1, f"there is no op {instruction.op}")
        self.index = 0
        graph = program.graph
        resident = {*map(held, program.ownership.buckets), *graph.buffers, *graph.constants, *graph.batch}
        buckets, position = program.ownership.buckets, program.position
        sums = {acc(b.name) for b in buckets if b.trains}
        kept = {whole(b.name) for b in buckets if not b.at_hand and not b.policy.regather}
        for what, declared, due, between in (
            ("entry", set(program.entry), resident, not position.begins),
            ("exit", set(program.exit), resident.union(graph.outputs), not position.ends),
        ):
            due = due | sums if between else due
            for value in sorted((declared ^ due) - (kept if between else set())):
                self.fail(5, f"{value} is " + (f"declared at {what}" if value in declared else f"missing at {what}"))

    # One step

    def step(self, instruction: Instruction) -> None:
        match instruction:
            case Run(op):
                self.run(op)
            case Wait(id):
                self.wait(id)
            case Free(value):
                self.free(value)
            case Cast(bucket):
                self.read(master(bucket))
                self.make(cast(self.program.bucket(bucket)))
            case Pack(bucket):
                self.pack(bucket)
            case Accumulate(bucket):
                self.accumulate(bucket)
            case Update(buckets):
                self.update(buckets)
            case Gather() | ReduceScatter() | AllReduce() | GatherGradient():
                self.launch(instruction)

    def run(self, name: str) -> None:
        op = self.program.graph.op[name]
        self.runs[name] = self.runs.get(name, 0) + 1
        if self.runs[name] > 1 and op.kind in (OpKind.RANDOM, OpKind.WRITE):
            self.fail(7, f"{op.kind.value} op {name} ({op.target}) runs twice")
        if op.phase is Phase.BACKWARD:
            self.backward = self.backward or name
        elif self.backward and self.runs[name] == 1 and not is_chain(self.program.graph, op):
            self.fail(8, f"forward op {name} runs after backward op {self.backward}")
        for value in op.inputs:
            self.read(value)
        if name in self.due:
            found = self.effects.before(op)
            for what, due in self.due[name].items():
                if found[what] != due:
                    self.fail(7, f"{name} ({op.target}) comes after {found[what]} {what}, in the graph after {due}")
        self.effects.after(op)
        for value in op.outputs:
            self.make(value)

    def launch(self, launch: Launch) -> None:
        if launch.id in self.launched:
            self.fail(2, f"collective {launch.id} is launched twice")
        kind = type(launch)
        if self.newest.get(kind, -1) > launch.id:
            self.fail(6, f"collective {launch.id} is launched after {self.newest[kind]}")
        self.launched[launch.id] = kind
        self.newest[kind] = launch.id
        if not isinstance(launch, Gather):
            self.trained(launch.bucket)
        self.read(takes(launch))
        if isinstance(launch, (ReduceScatter, AllReduce)):
            if launch.bucket in self.reduced:
                self.fail(3, f"the gradients of {launch.bucket} are reduced twice")
            if self.adds_up and adds_first(self.program.bucket(launch.bucket)):
                if launch.bucket not in self.added:
                    self.fail(3, f"the gradients of {launch.bucket} are reduced before micro-batches are added up")
                if not self.program.position.updates:
                    self.fail(3, f"the gradients of {launch.bucket} are reduced before the last micro-batch")
            self.reduced.add(launch.bucket)
        if makes(launch) in self.live or makes(launch) in map(makes, self.flying.values()):
            self.fail(4, f"{makes(launch)} is made while it is there already")
        self.flying[launch.id] = launch
        gathers = sum(isinstance(each, Gather) for each in self.flying.values())
        for what, count, cap in (
            ("gathers", gathers, self.program.caps.gathers),
            ("reductions", len(self.flying) - gathers, self.program.caps.reductions),
        ):
            if count > cap:
                self.fail(10, f"{count} {what} are in flight, the cap is {cap}")

    def wait(self, id: int) -> None:
        if id not in self.flying:
            self.fail(2, f"collective {id} is waited for " + ("twice" if id in self.launched else "but never launched"))
        launch = self.flying.pop(id)
        if takes(launch) not in self.live:
            self.fail(4, f"{takes(launch)} was freed while collective {id} read it")
        self.make(makes(launch))

    def free(self, value: str) -> None:
        if value not in self.live:
            self.fail(4, f"{value} is freed, but is not alive")
        for launch in self.flying.values():
            if takes(launch) == value:
                self.fail(4, f"{value} is freed while collective {launch.id} reads it")
        if self.views.get(value):
            self.fail(4, f"{value} is freed while its view {min(self.views[value])} is alive")
        self.live.discard(value)
        for holder in self.holders(value):
            self.views.get(holder, set()).discard(value)

    def pack(self, name: str) -> None:
        self.trained(name)
        for slot in self.program.bucket(name).slots:
            grad = self.program.graph.tensor[slot.tensor].grad
            if grad is None:
                self.fail(9, f"{slot.tensor} gets no gradient, but {name} is packed")
            else:
                self.read(grad)
        if name in self.packed:
            self.fail(3, f"the gradients of {name} are packed twice")
        self.packed.add(name)
        self.make(flat(name))

    def accumulate(self, name: str) -> None:
        self.trained(name)
        program = self.program
        if not self.adds_up:
            self.fail(3, f"the gradients of {name} are added up, but there is one micro-batch")
        if name in self.added:
            self.fail(3, f"the gradients of {name} are added up twice")
        self.added.add(name)
        self.read(adds(program.bucket(name)))
        if program.position is Position.FIRST:
            self.make(acc(name))
        else:
            self.read(acc(name))

    @property
    def adds_up(self) -> bool:
        return self.program.position not in (Position.ONLY, Position.EVALUATION)

    def update(self, names: tuple[str, ...]) -> None:
        if self.updated:
            self.fail(3, "the update comes twice: the optimizer steps once")
        if not self.program.position.updates:
            self.fail(3, f"the update comes in a program for the {self.program.position.value} micro-batch")
        for launch in self.flying.values():
            if isinstance(launch, Gather) and launch.bucket in names:
                self.fail(1, f"{takes(launch)} is updated while collective {launch.id} reads it")
        for name in names:
            self.trained(name)
            bucket = self.program.bucket(name)
            if name in self.updated:
                self.fail(3, f"{name} is updated twice")
            if name not in self.packed or (bucket.world > 1 and name not in self.reduced):
                self.fail(3, f"{name} is updated before its gradients are reduced")
            if self.adds_up and name not in self.added:
                self.fail(3, f"{name} is updated before its micro-batches are added up")
            self.read(gradient(bucket))
            self.updated.add(name)

    def border(self) -> None:
        """Law 8, between forward and backward."""
        program = self.program
        strict = {b.name for b in program.ownership.buckets if not b.at_hand and b.policy.regather}
        for launch in self.flying.values():
            if isinstance(launch, Gather) and launch.bucket in strict:
                self.fail(8, f"{makes(launch)} is in flight from forward to backward")
        for value in sorted(self.live):
            of = {value.partition(":")[0]} if value.endswith(":whole") else program.home.get(value, frozenset())
            for name in sorted(of & strict):
                self.fail(8, f"{value} crosses from forward to backward, and {name} is at stage 3")

    def end(self) -> None:
        program = self.program
        for id in self.flying:
            self.fail(2, f"collective {id} is never waited for")
        for bucket in program.ownership.buckets:
            if not bucket.trains or program.position is Position.EVALUATION:
                continue
            if program.position.updates and bucket.name not in self.updated:
                self.fail(3, f"the gradients of {bucket.name} never reach the update")
            if not program.position.updates and bucket.name not in self.added:
                self.fail(3, f"the gradients of {bucket.name} are never added up")
        for op in program.graph.ops:
            if op.name not in self.runs and not is_chain(program.graph, op):
                self.fail(7, f"{op.kind.value} op {op.name} ({op.target}) never runs")
        left, declared = self.live, set(program.exit)
        for value in sorted(left - declared):
            self.fail(5, f"{value} is left at exit")
        for value in sorted(declared - left):
            self.fail(5, f"{value} should be there at exit, and is not")

    # What holds

    def read(self, value: str) -> None:
        tensor = value in self.program.graph.tensor
        holder = whole(self.program.ownership.home[value]) if tensor else value
        owner, _, of = value.partition(":")
        origin = frozenset({owner}) if of in ("part", "master") else self.program.home.get(value, frozenset())
        for bucket in sorted(origin & self.updated):
            self.fail(1, f"{value} is read after the update of {bucket}")
        if holder in self.live:
            return
        for launch in self.flying.values():
            if makes(launch) == holder:
                self.fail(1, f"{value} is read while collective {launch.id} is in flight")
        self.fail(1, f"{value} is read, but is not " + ("whole" if tensor else "alive"))

    def make(self, value: str) -> None:
        if value in self.live:
            self.fail(4, f"{value} is made while it is there already")
        self.live.add(value)
        for holder in self.holders(value):
            self.views.setdefault(holder, set()).add(value)

    def holders(self, value: str) -> list[str]:
        """The whole buckets whose storage `value` lives in."""
        graph = self.program.graph
        made = graph.values.get(value)
        if made is None or value in graph.tensor or made.storage not in graph.tensor:
            return []
        return [whole(self.program.ownership.home[made.storage])]

    def trained(self, name: str) -> None:
        if not self.program.bucket(name).trains:
            self.fail(9, f"the parameters of {name} get no gradients")

    def fail(self, law: int, what: str) -> None:
        lines = []
        for index in range(max(0, self.index - EXCERPT), min(len(self.program.instructions), self.index + EXCERPT)):
            mark = "-->" if index == self.index else "   "
            lines.append(f"{mark} {index:4d} {self.program.instructions[index]!r}")
        raise CheckError(f"law {law}: {what}\n" + "\n".join(lines) + "\nThis is a fault of zplan: please report it.")


class _Effects:
    """Draws and writes so far, where programs must agree with their graph; a buffer's writes go by its name."""

    def __init__(self, graph: Graph) -> None:
        self._values = graph.values
        self._buffers = {graph.values[name].storage: name for name in graph.buffers}
        self._count = {"draws": 0, **{self._of(name): 0 for name in graph.buffers}}

    def before(self, op: Op) -> Mapping[str, int]:
        """What has been done, of what the op depends on."""
        keys = [self._of(name) for name in self._touched(op)] + ["draws"] * (op.kind is OpKind.RANDOM)
        return {key: self._count[key] for key in keys}

    def after(self, op: Op) -> None:
        if op.kind is OpKind.RANDOM:
            self._count["draws"] += 1
        elif op.kind is OpKind.WRITE:
            for name in self._touched(op):
                self._count[self._of(name)] += 1

    def _touched(self, op: Op) -> list[str]:
        if not self._buffers:
            return []
        storages = dict.fromkeys(self._values[name].storage for name in op.inputs)
        return [self._buffers[storage] for storage in storages if storage in self._buffers]

    @staticmethod
    def _of(buffer: str) -> str:
        return f"writes of {buffer}"


def _due(graph: Graph) -> Mapping[str, Mapping[str, int]]:
    """Op name -> draws and writes before it in the graph."""
    effects = _Effects(graph)
    due: dict[str, Mapping[str, int]] = {}
    for op in graph.ops:
        if found := effects.before(op):
            due[op.name] = found
        effects.after(op)
    return due
