"""Sink waits: reductions are waited for later, so that backward hides them."""

from collections.abc import Iterator
from dataclasses import replace

from zplan.errors import SpecError
from zplan.planner.program import (
    Accumulate,
    AllReduce,
    Free,
    GatherGradient,
    Instruction,
    Position,
    Program,
    ReduceScatter,
    Update,
    Wait,
    acc,
    adds_first,
    grad,
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
    followers = {x.bucket: x for x in program.instructions if isinstance(x, GatherGradient)}
    due: dict[int, list[Instruction]] = {}
    reductions = (x for x in program.instructions if isinstance(x, (ReduceScatter, AllReduce)))
    for place, launch in enumerate(reductions):
        for step, held in enumerate(_steps(program, launch, followers.get(launch.bucket)), start=1):
            due.setdefault(place + step * depth, []).extend(held)
    moved = {instruction for held in due.values() for instruction in held}
    instructions: list[Instruction] = []
    launched = 0
    for instruction in program.instructions:
        if instruction in moved:
            continue
        if isinstance(instruction, Update):
            instructions += _drain(due)
        elif isinstance(instruction, (ReduceScatter, AllReduce)):
            instructions += due.pop(launched, ())
            launched += 1
        instructions.append(instruction)
    instructions += _drain(due)
    cap = max(program.caps.reductions, 2 * depth if followers else depth)
    return program.with_(tuple(instructions), caps=replace(program.caps, reductions=cap))


def _steps(
    program: Program, launch: ReduceScatter | AllReduce, follower: GatherGradient | None
) -> Iterator[list[Instruction]]:
    """What follows a launch: its wait and free, with the second collective of an all-reduce; then those of that.

    What is added up after its reduction is so at the wait.
    """
    ended: list[Instruction] = [Wait(launch.id), Free(takes(launch))]
    if program.position is not Position.ONLY and not adds_first(program.bucket(launch.bucket)):
        done = acc(launch.bucket) if program.position.updates else grad(launch.bucket)
        ended += [Accumulate(launch.bucket), Free(done)]
    if follower is None:
        yield ended
    else:
        yield [*ended, follower]
        yield [Wait(follower.id), Free(takes(follower))]


def _drain(due: dict[int, list[Instruction]]) -> list[Instruction]:
    """All that is still due, in the order in which further launches would have brought it out."""
    return [instruction for now in sorted(due) for instruction in due.pop(now)]
