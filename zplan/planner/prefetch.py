"""Prefetch: gathers are launched ahead of their first use, so that computation hides them."""

from dataclasses import replace

from zplan.errors import SpecError
from zplan.planner.program import Cast, Free, Gather, Instruction, Program, Wait, whole


def prefetch(program: Program, *, distance: int) -> Program:
    """Launches each gather up to `distance` buckets before its first use.

    wait a; run f(a); gather b; wait b; run g(b)
        ->  gather b; wait a; run f(a); wait b; run g(b)

    Memory: up to `distance` more buckets in flight. Order of gathers is kept. A gather stays behind the free of the
    same bucket, and on its own side of the border between forward and backward: a bucket that backward gathers anew
    is never held across it. The cast of what it sends moves with it.
    """
    if distance < 0:
        raise SpecError(f"prefetch {distance} is below zero: 0 gathers just before use, 1 is one bucket ahead")
    gathers = [i for i, instruction in enumerate(program.instructions) if isinstance(instruction, Gather)]
    if distance == 0 or not gathers:
        return program
    waits = {x.id: i for i, x in enumerate(program.instructions) if isinstance(x, Wait)}
    barrier = _barriers(program)
    order = [_gather(program, index) for index in gathers]
    target: dict[int, list[Cast | Gather]] = {}
    cast = {index: _cast(program, index) for index in gathers}
    moved = {index - 1 for index in gathers if cast[index]}
    floor = 0
    for i, index in enumerate(gathers):
        wanted = min(waits[order[max(0, i - distance)].id], index)
        floor = max(floor, wanted, barrier[index])
        target.setdefault(floor, []).extend([*cast[index], order[i]])
    instructions: list[Instruction] = []
    for index, instruction in enumerate(program.instructions):
        instructions += target.get(index, ())
        if not isinstance(instruction, Gather) and index not in moved:
            instructions.append(instruction)
    caps = replace(program.caps, gathers=max(program.caps.gathers, distance + 1))
    return program.with_(tuple(instructions), caps=caps)


def _cast(program: Program, index: int) -> list[Cast]:
    """The cast just before a gather, of what it sends."""
    before = program.instructions[index - 1] if index else None
    gather = _gather(program, index)
    return [before] if isinstance(before, Cast) and before.bucket == gather.bucket else []


def _barriers(program: Program) -> dict[int, int]:
    """For the index of each gather, the first index at which it may stand."""
    barrier: dict[int, int] = {}
    freed: dict[str, int] = {}
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            freed[instruction.value] = index + 1
        elif isinstance(instruction, Gather):
            low = program.boundary if index >= program.boundary else 0
            barrier[index] = max(low, freed.get(whole(instruction.bucket), 0))
    return barrier


def _gather(program: Program, index: int) -> Gather:
    instruction = program.instructions[index]
    assert isinstance(instruction, Gather)
    return instruction
