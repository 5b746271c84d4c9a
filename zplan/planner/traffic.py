"""Traffic: the bytes that each rank sends, instruction by instruction."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zplan.planner.program import AllReduce, Gather, GatherGradient, Instruction, Program, ReduceScatter
from zplan.units import ITEMSIZE


def sent_nbytes(program: Program, instruction: Instruction) -> int:
    """Bytes that one rank sends for an instruction, padding included.

    A gather of N equal parts sends each rank's part N - 1 times, whether around a ring or straight to the others; a
    reduce-scatter sends N - 1 parts of local gradients; an all-reduce is both.
    """
    match instruction:
        case Gather(_, name):
            bucket = program.bucket(name)
            return (bucket.world - 1) * bucket.part_nbytes
        case ReduceScatter(_, name) | GatherGradient(_, name):
            bucket = program.bucket(name)
            return (bucket.world - 1) * bucket.part * ITEMSIZE[bucket.wire]
        case AllReduce(_, name):
            bucket = program.bucket(name)
            return 2 * (bucket.world - 1) * bucket.part * ITEMSIZE[bucket.wire]
    return 0


@dataclass(frozen=True)
class Traffic:
    """A fold over the instructions of a program. Bytes are those of one rank and one optimizer step.

    `before`: the programs of the micro-batches before this one, with how many of each there are.
    """

    program: Program
    before: tuple[tuple[Program, int], ...] = ()

    @cached_property
    def by_instruction(self) -> tuple[int, ...]:
        return tuple(sent_nbytes(self.program, instruction) for instruction in self.program.instructions)

    @property
    def bytes_per_rank(self) -> int:
        return sum(self.by_kind.values())

    @cached_property
    def by_kind(self) -> Mapping[str, int]:
        """Bytes by what is sent: gathers of parameters, reduce-scatters, all-reduces, gathers of gradients."""
        kinds = {Gather: "gather", ReduceScatter: "reduce-scatter", AllReduce: "all-reduce"}
        found: dict[str, int] = {}
        for program, times in (*self.before, (self.program, 1)):
            for instruction in program.instructions:
                if nbytes := sent_nbytes(program, instruction):
                    kind = kinds.get(type(instruction), "gather gradients")
                    found[kind] = found.get(kind, 0) + times * nbytes
        return found

    @property
    def padding_nbytes(self) -> int:
        """The part of `bytes_per_rank` that is padding."""
        total = 0
        for program, times in (*self.before, (self.program, 1)):
            for instruction in program.instructions:
                if nbytes := sent_nbytes(program, instruction):
                    bucket = program.bucket(instruction.bucket)  # type: ignore[union-attr]
                    total += times * (nbytes * bucket.padding // bucket.numel)
        return total
