"""Every error that zplan raises on purpose.

The first ones tell the user what to change. `CheckError` alone is a fault of zplan itself.
"""

from difflib import get_close_matches


class ZplanError(Exception):
    """The root of every error here: catch it to catch all of them."""


class SpecError(ZplanError):
    """What was asked for does not exist, contradicts itself, or is no size, stage or name."""


class TraceError(ZplanError):
    """The model, loss or optimizer cannot be captured as one graph; names the user's own line."""


class AgreementError(ZplanError):
    """The ranks do not hold the same plan, or one of them failed; raised on every rank with the same words."""


class StepError(ZplanError):
    """A running step failed at one instruction; what the rank holds may be torn, and the step takes no more batches."""


class StateError(ZplanError):
    """A call that the training step cannot honour in the state it is in."""


class BudgetError(ZplanError):
    """A plan peaks above the memory budget; says by how much, where, and what would help."""


class CheckError(ZplanError):
    """A program breaks a law. This is a fault of zplan, not of the model: please report it."""


def nearest(name: str, known: list[str]) -> str:
    """`; nearest: a, b`, or nothing where nothing is near."""
    found = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(found)}" if found else ""
