"""zplan: a declarative planner and compiler of model states for PyTorch training."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zplan.api import Job, annotate, compile, plan
    from zplan.errors import (
        AgreementError,
        CheckError,
        SpecError,
        StateError,
        StepError,
        TraceError,
        ZplanError,
    )
    from zplan.planner.plan import Plan
    from zplan.planner.show import compare_text as compare
    from zplan.planner.stages import STAGES
    from zplan.runtime.step import TrainStep

# Where each public name lives, and what it is called there.
_HOME = {
    "AgreementError": ("zplan.errors", "AgreementError"),
    "CheckError": ("zplan.errors", "CheckError"),
    "Job": ("zplan.api", "Job"),
    "Plan": ("zplan.planner.plan", "Plan"),
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
    "plan": ("zplan.api", "plan"),
}

__all__ = [
    "STAGES",
    "AgreementError",
    "CheckError",
    "Job",
    "Plan",
    "SpecError",
    "StateError",
    "StepError",
    "TraceError",
    "TrainStep",
    "ZplanError",
    "annotate",
    "compare",
    "compile",
    "plan",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads a name when it is first asked for: planning alone then never imports torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'zplan' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
