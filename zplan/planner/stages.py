"""Stages: one table that says what a tensor's stage means.

Source: Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5: optimizer states are partitioned at stage 1,
gradients too at stage 2, parameters too at stage 3. Deviation: at stages 1 and 2 the updated parameters are
gathered ahead of their first use in the next forward, not after the update; the volume is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from zplan.errors import SpecError


class Residency(Enum):
    WHOLE = "whole"
    SHARD = "shard"


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage means for a tensor that is trained.

    `state`, `accumulator`, `parameter`: what a rank holds of the optimizer state, of the gradient accumulator and,
    between optimizer steps, of the parameter. `regather`: the whole parameter is given back after forward and
    gathered again for backward. `reduce_always`: gradients are reduced in every micro-batch, not only in the last.
    """

    number: int
    state: Residency
    accumulator: Residency
    parameter: Residency
    regather: bool
    reduce_always: bool
    reduction: str
    sent: str


STAGES: Mapping[int, Stage] = {
    stage.number: stage
    for stage in (
        Stage(0, Residency.WHOLE, Residency.WHOLE, Residency.WHOLE, False, False, "all-reduce", "2 psi"),
        Stage(1, Residency.SHARD, Residency.WHOLE, Residency.SHARD, False, False, "reduce-scatter", "2 psi"),
        Stage(2, Residency.SHARD, Residency.SHARD, Residency.SHARD, False, True, "reduce-scatter", "2 psi"),
        Stage(3, Residency.SHARD, Residency.SHARD, Residency.SHARD, True, True, "reduce-scatter", "3 psi"),
    )
}


AUTO = "auto"


def parse_stage(stage: object, *, what: str = "stage") -> int:
    """Returns 0, 1, 2 or 3.

    >>> parse_stage("3")
    3
    """
    if isinstance(stage, str) and stage.strip() in ("0", "1", "2", "3"):
        return int(stage)
    if isinstance(stage, int) and not isinstance(stage, bool) and stage in STAGES:
        return stage
    if stage == AUTO:
        raise SpecError(f"{what} 'auto' is for the whole plan: give 0, 1, 2 or 3 here")
    raise SpecError(f"{what} {stage!r} does not exist: there are 0, 1, 2 and 3")
