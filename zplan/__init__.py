"""zplan: a declarative planner and compiler of model states for PyTorch training."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zplan.api import Job, annotate, compile, plan
    from zplan.errors import (
        AgreementError,
        BudgetError,
        CheckError,
        SpecError,
        StateError,
        TraceError,
        ZplanError,
    )
    from zplan.planner.plan import Plan
    from zplan.runtime.step import TrainStep

_HOME = {
    "AgreementError": "zplan.errors",
    "BudgetError": "zplan.errors",
    "CheckError": "zplan.errors",
    "Job": "zplan.api",
    "Plan": "zplan.planner.plan",
    "SpecError": "zplan.errors",
    "StateError": "zplan.errors",
    "TraceError": "zplan.errors",
    "TrainStep": "zplan.runtime.step",
    "ZplanError": "zplan.errors",
    "annotate": "zplan.api",
    "compile": "zplan.api",
    "plan": "zplan.api",
}

__all__ = [
    "AgreementError",
    "BudgetError",
    "CheckError",
    "Job",
    "Plan",
    "SpecError",
    "StateError",
    "TraceError",
    "TrainStep",
    "ZplanError",
    "annotate",
    "compile",
    "plan",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads a name when it is first asked for: planning alone then never imports torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'zplan' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
