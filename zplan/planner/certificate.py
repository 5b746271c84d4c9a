"""Certificate: what the simulation of one stage found, and with it why that stage was taken or not."""

from collections.abc import Sequence
from dataclasses import dataclass

from zplan.planner.memory import Memory
from zplan.units import format_bytes


@dataclass(frozen=True, slots=True)
class Certificate:
    """A stage's peak, in bytes of one rank, where it is and what is alive there; `budget` None: there is none."""

    stage: int
    budget: int | None
    peak_bytes: int
    resident_bytes: int
    sent_bytes: int
    where: str
    alive: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.over <= 0

    @property
    def over(self) -> int:
        """Bytes above the budget; zero or less: it fits."""
        return 0 if self.budget is None else self.peak_bytes - self.budget

    @property
    def verdict(self) -> str:
        if self.budget is None:
            return "no budget"
        return f"fits, {format_bytes(-self.over)} to spare" if self.fits else f"{format_bytes(self.over)} over"


def totals(memory: Memory) -> tuple[str, ...]:
    """Bytes at the peak, by category, largest first: `320 MiB optimizer state`."""
    largest = sorted(memory.by_category.items(), key=lambda item: -item[1])
    return tuple(f"{format_bytes(nbytes)} {category.value}" for category, nbytes in largest)


def lowest(certificates: Sequence[Certificate]) -> Certificate | None:
    """That of the lowest stage that fits, or None."""
    return next((each for each in sorted(certificates, key=lambda each: each.stage) if each.fits), None)
