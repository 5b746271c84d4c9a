"""Evaluation: the loss of a batch without gradients, as a program of its own over the parts that training holds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from zplan.graph.ir import digest
from zplan.graph.trace import Trace, trace
from zplan.planner.plan import Plan, program_of
from zplan.planner.program import LAUNCHES, Position
from zplan.runtime.agree import Report
from zplan.runtime.comm import Comm
from zplan.runtime.rewrite import Ready, inputs, rewrite


@dataclass(frozen=True)
class Evaluation:
    """What runs the batches of one structure and shape."""

    trace: Trace
    ready: Ready

    def report(self) -> Report:
        """Equal on ranks whose collectives are the same, in the same order; shapes of batches may differ."""
        launches = [repr(x) for x in self.ready.program.instructions if isinstance(x, LAUNCHES)]
        return Report(plan=digest(launches), lines=tuple(launches))


def make_evaluation(
    plan: Plan, model: torch.nn.Module, loss_fn: Callable[[Any, Any], Any], batch: Any, comm: Comm
) -> Evaluation:
    """Traces the loss in evaluation mode and lowers it at the plan's stages: gathers alone, nothing updated."""
    traced = trace(model, loss_fn, batch, device=plan.graph.device, evaluate=True, precision=plan.spec.precision)
    # Optimizer states stay where they are meanwhile: they count as memory.
    graph = replace(traced.graph, optimizer=plan.graph.optimizer)
    program = program_of(graph, plan.ownership, plan.spec, Position.EVALUATION)
    module = rewrite(traced, program, comm, torch.nn.Module())
    return Evaluation(traced, Ready(program, module, inputs(program)))
