"""Sink waits: reductions are waited for later, so that backward hides them."""

from dataclasses import replace

from zplan.errors import SpecError
from zplan.planner.program import (
    REDUCTIONS,
    Free,
    GatherGradient,
    Instruction,
    Launch,
    Program,
    Update,
    Wait,
    takes,
)


def sink_waits(program: Program, *, depth: int) -> Program:
    """Waits for a reduction when `depth` later ones have been launched, or the update needs it.

    reduce a; wait a; free a; run g; reduce b; wait b; free b; update
        ->  reduce a; run g; reduce b; wait a; free a; wait b; free b; update       (depth 2)

    Memory: up to `depth` buckets of local gradients, and what their reductions need, stay until their waits. An
    all-reduce made of two collectives may have `depth` of each in flight. Order of reductions is kept. Depth 1 waits
    just before the next launch.
    """
    if depth < 1:
        raise SpecError(f"depth {depth} is below one: 1 waits for a reduction before the next is launched")
    chains = _Chains(program, depth)
    instructions: list[Instruction] = []
    for instruction in program.instructions:
        if chains.hold(instruction):
            continue
        if isinstance(instruction, Update):
            instructions += chains.drain()
        elif isinstance(instruction, REDUCTIONS):
            instructions += chains.open(instruction)
        instructions.append(instruction)
    instructions += chains.drain()
    double = any(isinstance(instruction, GatherGradient) for instruction in program.instructions)
    cap = max(program.caps.reductions, 2 * depth if double else depth)
    return program.with_(tuple(instructions), caps=replace(program.caps, reductions=cap))


class _Chains:
    """What follows each launch, held back: [[wait, free]], or [[wait, free, gather], [wait, free]] for an all-reduce."""

    def __init__(self, program: Program, depth: int) -> None:
        self._depth = depth
        self._held: list[list[list[Instruction]]] = []
        self._chain: dict[Instruction, int] = {}
        self._follower = {x.bucket: x for x in program.instructions if isinstance(x, GatherGradient)}

    def open(self, launch: Launch) -> list[Instruction]:
        """Begins a chain; returns what must run before its launch, so that no more than `depth` are in flight."""
        due = self._due(len(self._held))
        launches = [launch, *([self._follower[launch.bucket]] if launch.bucket in self._follower else ())]
        for each in launches:
            self._chain |= dict.fromkeys((each, Wait(each.id), Free(takes(each))), len(self._held))
        self._held.append([])
        return due

    def hold(self, instruction: Instruction) -> bool:
        """Takes what follows an open launch; says whether it did."""
        chain = self._chain.get(instruction)
        if chain is None:
            return False
        if isinstance(instruction, Wait):
            self._held[chain].append([])
        self._held[chain][-1].append(instruction)
        return True

    def drain(self) -> list[Instruction]:
        """All that is still held, in the order in which further launches would have brought it out."""
        end = len(self._held)
        return [x for now in range(end, end + 2 * self._depth) for x in self._due(now)]

    def _due(self, now: int) -> list[Instruction]:
        due: list[Instruction] = []
        for level in (0, 1):
            chain = now - (level + 1) * self._depth
            if 0 <= chain < len(self._held) and level < len(self._held[chain]):
                due += self._held[chain][level]
                self._held[chain][level] = []
        return due
