"""Failure: which instruction of a running step an error came from, in the user's words."""

import traceback

from torch import fx

from zplan.planner.program import LAUNCHES, Launch, Program, Run, Wait
from zplan.runtime.rewrite import INSTRUCTION

# What gloo and NCCL say when a rank is gone.
_LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "socket")


def explain(module: fx.GraphModule, program: Program, error: BaseException) -> str:
    """Names the instruction, the user's module and line for an op, the bucket for a collective, and the error."""
    index = _index(module, error)
    words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no words'}"
    if index is None or not 0 <= index < len(program.instructions):
        return f"the step failed: {words}"
    instruction = program.instructions[index]
    if isinstance(instruction, Run):
        op = program.graph.op[instruction.op]
        where = ", ".join(part for part in (op.module, op.line) if part) or "the loss"
        return f"instruction {index}, {op.phase.value} of {where}: {op.target} failed: {words}"
    if isinstance(instruction, Wait):
        started = next(x for x in program.instructions if isinstance(x, LAUNCHES) and x.id == instruction.id)
        what = f"the wait for {_collective(started)}"
    elif isinstance(instruction, LAUNCHES):
        what = f"the launch of {_collective(instruction)}"
    else:
        what = type(instruction).__name__.lower()
    lost = any(sign in str(error).lower() for sign in _LOST)
    hint = "; another rank has ended or hangs: look at its own error" if lost else ""
    return f"instruction {index}, {what} failed: {words}{hint}"


def _collective(launch: Launch) -> str:
    names = {"Gather": "gather", "ReduceScatter": "reduce-scatter", "AllReduce": "all-reduce"}
    return f"{names.get(type(launch).__name__, 'gather of gradients')} {launch.id} of bucket {launch.bucket}"


def _index(module: fx.GraphModule, error: BaseException) -> int | None:
    """The generated code has one line for a node, and begins it with the node's name."""
    tags = {node.name: node.meta[INSTRUCTION] for node in module.graph.nodes if INSTRUCTION in node.meta}
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith("<eval_with_key"):
            index = tags.get((frame.line or "").partition(" ")[0])
            if isinstance(index, int):
                return index
    return None
