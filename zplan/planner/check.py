"""Check: the laws of a valid program, walked instruction by instruction.

    1  every value read is whole and not in flight
    2  every collective is waited for exactly once
    3  every gradient reaches the update reduced, exactly once
    4  nothing is freed twice, used after its free, or freed while a view of it is alive
    5  at exit exactly the declared residents are left
    6  collectives have one order: within a kind, ids rise from launch to launch
    7  no random op and no op that writes a buffer runs twice, or is left out
    8  at stage 3 nothing whole of a parameter crosses from forward to backward
    9  frozen and unused parameters have no gradient traffic
    10 gathers and reductions in flight stay within their caps
"""

from dataclasses import dataclass, field

from zplan.errors import CheckError
from zplan.graph.ir import OpKind
from zplan.planner.program import (
    AllReduce,
    Free,
    Gather,
    GatherGradient,
    Instruction,
    Launch,
    Pack,
    Program,
    ReduceScatter,
    Run,
    Update,
    Wait,
    flat,
    gradient,
    makes,
    takes,
    whole,
)

EXCERPT = 5


def check(program: Program) -> Program:
    """Returns the program as it is, or raises `CheckError` with the law, the instruction and those around it."""
    walk = _Walk(program)
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
    reduced: set[str] = field(default_factory=set)
    updated: set[str] = field(default_factory=set)
    views: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.live.update(self.program.entry)

    # One step

    def step(self, instruction: Instruction) -> None:
        match instruction:
            case Run(op):
                self.run(op)
            case Wait(id):
                self.wait(id)
            case Free(value):
                self.free(value)
            case Pack(bucket):
                self.pack(bucket)
            case Update(buckets):
                self.update(buckets)
            case Gather() | ReduceScatter() | AllReduce() | GatherGradient():
                self.launch(instruction)

    def run(self, name: str) -> None:
        op = self.program.graph.op.get(name)
        if op is None:
            self.fail(1, f"there is no op {name}")
        self.runs[name] = self.runs.get(name, 0) + 1
        if self.runs[name] > 1 and op.kind in (OpKind.RANDOM, OpKind.WRITE):
            self.fail(7, f"{op.kind.value} op {name} ({op.target}) runs twice")
        for value in op.inputs:
            self.read(value)
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
        self.read(takes(launch))
        if not isinstance(launch, Gather):
            self.trained(launch.bucket)
        if isinstance(launch, (ReduceScatter, AllReduce)):
            if launch.bucket in self.reduced:
                self.fail(3, f"the gradients of {launch.bucket} are reduced twice")
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

    def update(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.trained(name)
            bucket = self.program.bucket(name)
            if name in self.updated:
                self.fail(3, f"{name} is updated twice")
            if name not in self.packed or (bucket.world > 1 and name not in self.reduced):
                self.fail(3, f"{name} is updated before its gradients are reduced")
            self.read(gradient(bucket))
            self.updated.add(name)

    def border(self) -> None:
        """Law 8, between forward and backward."""
        program = self.program
        strict = {b.name for b in program.ownership.buckets if not b.whole_at_rest and b.policy.regather}
        for launch in self.flying.values():
            if isinstance(launch, Gather) and launch.bucket in strict:
                self.fail(8, f"{makes(launch)} is in flight from forward to backward")
        for value in sorted(self.live):
            held = {value.partition(":")[0]} if value.endswith(":whole") else program.home.get(value, frozenset())
            for name in sorted(held & strict):
                self.fail(8, f"{value} crosses from forward to backward, and {name} is at stage 3")

    def end(self) -> None:
        program = self.program
        for id in self.flying:
            self.fail(2, f"collective {id} is never waited for")
        for bucket in program.ownership.buckets:
            if bucket.trains and bucket.name not in self.updated:
                self.fail(3, f"the gradients of {bucket.name} never reach the update")
        for op in program.graph.ops:
            if op.kind in (OpKind.RANDOM, OpKind.WRITE) and op.name not in self.runs:
                self.fail(7, f"{op.kind.value} op {op.name} ({op.target}) never runs")
        left, declared = self.live, set(program.exit)
        for value in sorted(left - declared):
            self.fail(5, f"{value} is left at exit")
        for value in sorted(declared - left):
            self.fail(5, f"{value} should be there at exit, and is not")

    # What holds

    def read(self, value: str) -> None:
        tensor = value in self.program.graph.tensor
        held = whole(self.program.ownership.home[value]) if tensor else value
        if held in self.live:
            return
        for launch in self.flying.values():
            if makes(launch) == held:
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


