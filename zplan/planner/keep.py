"""Keep: a whole parameter stays over the gaps between forward, backward and micro-batches where its stage says so."""

from dataclasses import replace

from zplan.planner.program import Cast, Free, Gather, Instruction, Program, Wait, cast, part, whole


def keep(program: Program) -> Program:
    """Takes out the second gather of every bucket that is not at stage 3, with its cast, and the free before it.

    gather w; wait w; run f(w); free w; ...; gather w; wait w; run g(w); free w
        ->  gather w; wait w; run f(w); ...; run g(w); free w

    Over several micro-batches it stays from the first gather of the first to the last free of the last: it is among
    what the others begin and end with. Memory: the bucket is whole over the gaps. Traffic: one gather is left for each
    optimizer step. Buckets at stage 3 are left as they are.
    """
    position = program.position
    kept = {bucket.name for bucket in program.ownership.buckets if not bucket.policy.regather}
    gathered = {x.bucket for x in program.instructions if isinstance(x, (Cast, Gather))} & kept
    here = gathered if not position.begins else set()
    last_free = {x.value: index for index, x in enumerate(program.instructions) if isinstance(x, Free)}
    dropped: set[int] = set()
    parts: set[str] = set()
    instructions: list[Instruction] = []
    for index, instruction in enumerate(program.instructions):
        match instruction:
            case Cast(bucket) if bucket in here:
                parts.add(part(bucket))
                continue
            case Gather(id, bucket) if bucket in here:
                dropped.add(id)
                continue
            case Gather(_, bucket) | Cast(bucket) if bucket in kept and _makes_whole(program, instruction):
                here = here | {bucket}
            case Free(value) if value in parts:
                continue
            case Wait(id) if id in dropped:
                continue
            case Free(value) if _is_kept_whole(value, kept) and (index != last_free[value] or not position.ends):
                continue
        instructions.append(instruction)
    wholes = tuple(whole(bucket.name) for bucket in program.ownership.buckets if bucket.name in gathered)
    return replace(
        program.with_(tuple(instructions)),
        entry=program.entry if position.begins else (*program.entry, *wholes),
        exit=program.exit if position.ends else (*program.exit, *wholes),
    )


def _makes_whole(program: Program, instruction: Cast | Gather) -> bool:
    bucket = program.bucket(instruction.bucket)
    return isinstance(instruction, Gather) or cast(bucket) == whole(bucket.name)


def _is_kept_whole(value: str, kept: set[str]) -> bool:
    bucket = value.partition(":")[0]
    return bucket in kept and value == whole(bucket)
