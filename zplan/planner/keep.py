"""Keep: a whole parameter stays over the gap between forward and backward where its stage says so."""

from zplan.planner.program import Free, Gather, Instruction, Program, Wait, whole


def keep(program: Program) -> Program:
    """Takes out the second gather of every bucket that is not at stage 3, and the free before it.

    gather w; wait w; run f(w); free w; ...; gather w; wait w; run g(w); free w
        ->  gather w; wait w; run f(w); ...; run g(w); free w

    Memory: the bucket is whole over the gap. Traffic: one gather less. Buckets at stage 3 are left as they are.
    """
    kept = {bucket.name for bucket in program.ownership.buckets if not bucket.policy.regather}
    gathers: dict[str, int] = {}
    last_free: dict[str, int] = {}
    for index, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            last_free[instruction.value] = index
    dropped: set[int] = set()
    instructions: list[Instruction] = []
    for index, instruction in enumerate(program.instructions):
        match instruction:
            case Gather(id, bucket) if bucket in kept:
                gathers[bucket] = gathers.get(bucket, 0) + 1
                if gathers[bucket] > 1:
                    dropped.add(id)
                    continue
            case Wait(id) if id in dropped:
                continue
            case Free(value) if index != last_free[value] and _is_kept_whole(value, kept):
                continue
        instructions.append(instruction)
    return program.with_(tuple(instructions))


def _is_kept_whole(value: str, kept: set[str]) -> bool:
    bucket = value.partition(":")[0]
    return bucket in kept and value == whole(bucket)
