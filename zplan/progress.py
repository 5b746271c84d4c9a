"""Progress: what long work calls as it goes on, so that whoever asked for it can show where it is."""

from collections.abc import Callable

# Called with the name of a phase as it begins, and again as the count of what it makes (ops, say) grows.
Progress = Callable[[str, int], None]


def quiet(phase: str, count: int = 0) -> None:
    """Shows nothing."""
