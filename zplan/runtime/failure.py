"""Failure: which instruction of a running step an error came from, in the user's words."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

from zplan.errors import StateError
from zplan.planner.memory import Memory
from zplan.planner.program import LAUNCHES, Launch, Program, Run, Wait
from zplan.planner.rows import where
from zplan.runtime.rewrite import INSTRUCTION
from zplan.units import format_bytes

# What torch says when it gets no memory: on CUDA by class, on the host by words.
_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc")
# What gloo and NCCL say when a rank is gone.
_LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "socket")


def explain(module: fx.GraphModule, program: Program, error: BaseException) -> str:
    """Names the instruction, the user's module and line for an op, the bucket for a collective, and the error."""
    index = _index(module, error)
    words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no words'}"
    if no_memory(error):
        memory = Memory(program)
        words = (
            f"out of memory: {words}\nthe plan predicts {format_bytes(memory.peak_bytes)} at most, at "
            f"{where(program, memory.peak_index)}\n{LESS_MEMORY}"
        )
    if index is None or not 0 <= index < len(program.instructions):
        return f"the step failed: {words}"
    instruction = program.instructions[index]
    if isinstance(instruction, Run):
        op = program.graph.op[instruction.op]
        place = ", ".join(part for part in (op.module, op.line) if part) or "the loss"
        return f"instruction {index}, {op.phase.value} of {place}: {op.target} failed: {words}"
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


LESS_MEMORY = "try: a higher stage, more ranks, smaller micro-batches, or memory= with stage='auto'"


def no_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _NO_MEMORY)


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Inside, a want of memory is told with what was being done."""
    try:
        yield
    except Exception as error:
        if not no_memory(error):
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StateError(f"out of memory while {what}: {first}\n{LESS_MEMORY}") from error


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
