"""Plan: the decisions, the program they were lowered to, and what it will cost."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from zplan.errors import SpecError
from zplan.graph.ir import Graph, digest
from zplan.planner.buckets import make_buckets
from zplan.planner.certificate import Certificate, totals
from zplan.planner.choices import Choice, choose
from zplan.planner.memory import Memory
from zplan.planner.ownership import Ownership
from zplan.planner.pipeline import build
from zplan.planner.program import LAUNCHES, Position, Program
from zplan.planner.rows import where
from zplan.planner.show import schedule_text, summary_text
from zplan.planner.spec import Spec
from zplan.planner.stages import AUTO
from zplan.planner.traffic import Traffic

if TYPE_CHECKING:
    from zplan.planner.diff import Diff


@dataclass(frozen=True)
class Schedule:
    """The printed form of programs, about a page each; `collectives` gives each one a row, `ops` each instruction."""

    programs: tuple[Program, ...]

    def text(self, *, ops: bool = False, collectives: bool = False) -> str:
        texts = (
            schedule_text(program, Memory(program), Traffic(program), ops=ops, collectives=collectives)
            for program in self.programs
        )
        return "\n\n".join(texts)

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class Plan:
    """What will happen in one training step on every rank; `compile` runs exactly this.

    `stage`: of every tensor that nothing else gives one. `certificates`: what was found at each stage, where the stage
    was chosen by zplan. `programs`: of the first micro-batch, those between, and the last, or of the only one.
    """

    graph: Graph
    spec: Spec
    stage: int
    choices: Mapping[str, Choice]
    ownership: Ownership
    programs: tuple[Program, ...]
    certificates: tuple[Certificate, ...] = ()

    @property
    def program(self) -> Program:
        """That of the micro-batch that ends with the update."""
        return self.programs[-1]

    @cached_property
    def memory(self) -> Memory:
        """Of the micro-batch that peaks highest."""
        return max(map(Memory, self.programs), key=lambda memory: memory.peak_bytes)

    @cached_property
    def traffic(self) -> Traffic:
        """Of all micro-batches of an optimizer step."""
        times = {Position.MIDDLE: self.spec.micro_batches - 2}
        return Traffic(self.program, tuple((each, times.get(each.position, 1)) for each in self.programs[:-1]))

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.programs)

    @cached_property
    def hash(self) -> str:
        """Equal on every rank and in every run of the same model, spec and version of zplan."""
        buckets = [repr(bucket) for bucket in self.ownership.buckets]
        return digest([self.graph.hash, self.spec.model_dump(), buckets, [program.hash for program in self.programs]])

    @cached_property
    def agreement(self) -> str:
        """What ranks must have alike. Ops may come in another order: models that loop over a set do not fix it."""
        graph, buckets = self.graph, [repr(bucket) for bucket in self.ownership.buckets]
        tensors = [(t.name, t.aliases, t.shape, t.dtype, t.master, t.trainable, t.group) for t in graph.tensors]
        batch = [(name, graph.values[name].shape, graph.values[name].dtype) for name in graph.batch]
        launches = [repr(x) for each in self.programs for x in each.instructions if isinstance(x, LAUNCHES)]
        return digest(
            [graph.structure, tensors, repr(graph.optimizer), batch, self.spec.model_dump(), buckets, launches]
        )

    @cached_property
    def certificate(self) -> Certificate:
        """What this plan peaks at, against the budget of its spec."""
        return Certificate(
            stage=self.stage,
            budget=self.spec.memory,
            peak_bytes=self.memory.peak_bytes,
            resident_bytes=self.memory.resident_bytes,
            sent_bytes=self.traffic.bytes_per_rank,
            where=where(self.memory.program, self.memory.peak_index),
            alive=totals(self.memory),
        )

    def summary(self) -> str:
        """Ownership and memory, equal tensors folded, with the reason for each stage."""
        return summary_text(self)

    def __str__(self) -> str:
        return self.summary()

    def diff(self, other: "Plan") -> "Diff":
        """What `other` does that this plan does not, and the other way round; false where both are the same."""
        from zplan.planner.diff import diff

        return diff(self, other)

    def save(self, path: str | Path) -> None:
        """Writes a file that `zplan.load_plan` reads; it appears whole or not at all."""
        from zplan.planner.planfile import save

        save(self, path)


def make_plan(graph: Graph, spec: Spec, *, stage: int | None = None) -> Plan:
    """Choices, buckets, ownership, program: the whole way from a graph, without torch. `stage`: if not the spec's."""
    default = spec.stage if stage is None else stage
    if default == AUTO or isinstance(default, str):
        raise SpecError("stage 'auto' is chosen by planner.auto, from plans of a stage each")
    choices = choose(graph, default=default, rules=spec.rules, auto=spec.stage == AUTO)
    buckets = make_buckets(graph, choices, world=spec.world_size, bucket_nbytes=spec.bucket, reduce=spec.reduce)
    ownership = Ownership(buckets, spec.world_size)
    return Plan(graph, spec, default, choices, ownership, programs_of(graph, ownership, spec))


def programs_of(graph: Graph, ownership: Ownership, spec: Spec) -> tuple[Program, ...]:
    """One for each kind of micro-batch that a step has, in the order in which they run."""
    positions = {1: (Position.ONLY,), 2: (Position.FIRST, Position.LAST)}
    every = (Position.FIRST, Position.MIDDLE, Position.LAST)
    return tuple(program_of(graph, ownership, spec, each) for each in positions.get(spec.micro_batches, every))


def program_of(graph: Graph, ownership: Ownership, spec: Spec, position: Position = Position.ONLY) -> Program:
    options = {"distance": spec.prefetch, "depth": spec.depth}
    program = build(graph, ownership, **options, native=spec.native, position=position)
    earlier = {Position.MIDDLE: max(1, spec.micro_batches - 2), Position.LAST: max(1, spec.micro_batches - 1)}
    return replace(program, earlier=earlier.get(position, 0))
