"""zplan: a declarative planner and compiler of model states for PyTorch training."""

import importlib
from typing import TYPE_CHECKING, Any

from zplan.version import __version__

if TYPE_CHECKING:
    from zplan.api import Job, annotate, compile, load_plan, plan, plans
    from zplan.errors import (
        AgreementError,
        BudgetError,
        CheckError,
        SpecError,
        StateError,
        StepError,
        TraceError,
        ZplanError,
    )
    from zplan.planner.plan import Plan
    from zplan.planner.show import compare_text as compare
    from zplan.planner.spec import Rule, load_spec
    from zplan.planner.stages import STAGES
    from zplan.precision import Precision
    from zplan.runtime.measure import measure
    from zplan.runtime.step import TrainStep
    from zplan.weights import export

# Where each public name lives, and what it is called there.
_HOME = {
    "AgreementError": ("zplan.errors", "AgreementError"),
    "BudgetError": ("zplan.errors", "BudgetError"),
    "CheckError": ("zplan.errors", "CheckError"),
    "Job": ("zplan.api", "Job"),
    "Plan": ("zplan.planner.plan", "Plan"),
    "Precision": ("zplan.precision", "Precision"),
    "Rule": ("zplan.planner.spec", "Rule"),
    "STAGES": ("zplan.planner.stages", "STAGES"),
    "SpecError": ("zplan.errors", "SpecError"),
    "StateError": ("zplan.errors", "StateError"),
    "StepError": ("zplan.errors", "StepError"),
    "TraceError": ("zplan.errors", "TraceError"),
    "TrainStep": ("zplan.runtime.step", "TrainStep"),
    "ZplanError": ("zplan.errors", "ZplanError"),
    "annotate": ("zplan.api", "annotate"),
    "compare": ("zplan.planner.show", "compare_text"),
    "compile": ("zplan.api", "compile"),
    "export": ("zplan.weights", "export"),
    "load_plan": ("zplan.api", "load_plan"),
    "load_spec": ("zplan.planner.spec", "load_spec"),
    "measure": ("zplan.runtime.measure", "measure"),
    "plan": ("zplan.api", "plan"),
    "plans": ("zplan.api", "plans"),
}

__all__ = [
    "STAGES",
    "AgreementError",
    "BudgetError",
    "CheckError",
    "Job",
    "Plan",
    "Precision",
    "Rule",
    "SpecError",
    "StateError",
    "StepError",
    "TraceError",
    "TrainStep",
    "ZplanError",
    "__version__",
    "annotate",
    "compare",
    "compile",
    "export",
    "load_plan",
    "load_spec",
    "measure",
    "plan",
    "plans",
]


def __getattr__(name: str) -> Any:
    """Loads a name when it is first asked for: planning alone then never imports torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'zplan' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
