"""Plan: the decisions, the program they were lowered to, and what it will cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zplan.graph.ir import Graph, digest
from zplan.planner.buckets import make_buckets
from zplan.planner.memory import Memory
from zplan.planner.ownership import Ownership
from zplan.planner.pipeline import build
from zplan.planner.program import Program
from zplan.planner.show import schedule_text, summary_text
from zplan.planner.spec import Spec
from zplan.planner.stages import Choice, choose_stages
from zplan.planner.traffic import Traffic


@dataclass(frozen=True)
class Schedule:
    """The printed form of a program; `text(ops=True)` unfolds runs of compute."""

    program: Program
    memory: Memory
    traffic: Traffic

    def text(self, *, ops: bool = False) -> str:
        return schedule_text(self.program, self.memory, self.traffic, ops=ops)

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class Plan:
    """What will happen in one training step on every rank; `compile` runs exactly this."""

    graph: Graph
    spec: Spec
    choices: Mapping[str, Choice]
    ownership: Ownership
    program: Program

    @cached_property
    def memory(self) -> Memory:
        return Memory(self.program)

    @cached_property
    def traffic(self) -> Traffic:
        return Traffic(self.program)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.program, self.memory, self.traffic)

    @cached_property
    def hash(self) -> str:
        """Equal on every rank and in every run of the same model, spec and version of zplan."""
        buckets = [repr(bucket) for bucket in self.ownership.buckets]
        return digest([self.graph.hash, self.spec.model_dump(), buckets, self.program.hash])

    def summary(self) -> str:
        """Ownership and memory, equal tensors folded, with the reason for each stage."""
        return summary_text(self)

    def __str__(self) -> str:
        return self.summary()


def make_plan(graph: Graph, spec: Spec) -> Plan:
    """Stages, buckets, ownership, program: the whole way from a graph, without torch."""
    choices = choose_stages(graph, default=spec.stage)
    buckets = make_buckets(graph, choices, world=spec.world_size, bucket_nbytes=spec.bucket)
    ownership = Ownership(buckets, spec.world_size)
    return Plan(graph, spec, choices, ownership, build(graph, ownership, spec.schedule))
