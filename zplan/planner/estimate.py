"""Estimate: model states and traffic of a stage by formula, without a model.

Source: Rajbhandari et al., "ZeRO" (arXiv 1910.02054): bytes of model states in section 3.1, what each stage partitions
in section 5, traffic in section 7. psi = parameters, N = ranks, m = micro-batches per optimizer step. Deviations:

- The paper has m = 1 (2, 2, 2, 3 psi). With more, stages 2 and 3 reduce in every micro-batch and stage 3 gathers in
  every one: 2, 2, 1 + m, 3m psi.
- The paper drops the factor (N - 1) / N of what is sent; here are both.
- A rank's share is rounded up to a whole parameter: these are the bytes of the fullest rank.

The bounds of stages 1 and 2 differ by the gradients, whole or a shard, also with one micro-batch. What a plan
measures then does not: its stage 1 gives gradients back bucket by bucket, as its stage 2 does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zplan.errors import SpecError, nearest
from zplan.planner.show import table
from zplan.planner.stages import STAGES, Residency, parse_stage
from zplan.units import format_count, parse_count, parse_size

GB = 10**9


@dataclass(frozen=True, slots=True)
class Recipe:
    """Bytes that training holds for each parameter."""

    name: str
    parameter: int
    gradient: int
    state: int


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        # Section 3.1: 16-bit parameters and gradients; K = 12, Adam's fp32 copy, momentum and variance.
        Recipe("mixed", 2, 2, 12),
        # All of it in fp32: the parameters are their own copy.
        Recipe("fp32", 4, 4, 8),
    )
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one rank holds and sends at one stage; sent is per optimizer step.

    `ideal_nbytes` is what is sent without the factor (N - 1) / N, as the paper prints it.
    """

    stage: int
    params: int
    world: int
    micro_batches: int
    recipe: Recipe
    parameter_nbytes: int
    gradient_nbytes: int
    state_nbytes: int
    sent_nbytes: int
    ideal_nbytes: int

    @property
    def total_nbytes(self) -> int:
        return self.parameter_nbytes + self.gradient_nbytes + self.state_nbytes


def estimate(
    params: int | float | str, world: int, *, precision: str = "mixed", k: int | None = None, micro_batches: int = 1
) -> tuple[Estimate, ...]:
    """Returns stages 0 to 3. `k`: bytes of optimizer states per parameter, where they are not those of `precision`.

    >>> [each.total_nbytes / 1e9 for each in estimate(7.5e9, 64)]
    [120.0, 31.40625, 16.640625, 1.875]
    """
    psi, n, m = parse_count(params), _whole_number(world, "world"), _whole_number(micro_batches, "micro_batches")
    recipe = _recipe(precision, k)
    share = -(-psi // n)
    found = []
    for stage in STAGES:
        parameter, gradient, state = (each * (psi if whole else share) for each, whole in _held(stage, recipe))
        ideal = psi * _sent(stage, recipe, m)
        sent = -(-ideal * (n - 1) // n)
        found.append(Estimate(stage, psi, n, m, recipe, parameter, gradient, state, sent, ideal))
    return tuple(found)


def largest(memory: int | str, world: int, stage: int | str, *, precision: str = "mixed", k: int | None = None) -> int:
    """Returns the parameters of the largest model whose model states fit in a rank's memory; 0 where none does.

    >>> [largest("32GB", 64, stage) / 1e9 for stage in range(4)]
    [2.0, 7.641791042, 14.422535209, 128.0]
    """
    nbytes, n = parse_size(memory, what="memory"), _whole_number(world, "world")
    return _largest(nbytes, n, parse_stage(stage), _recipe(precision, k))


def _largest(memory: int, n: int, stage: int, recipe: Recipe) -> int:
    """The greatest psi with whole * psi + shared * ceil(psi / n) <= memory."""
    held = _held(stage, recipe)
    whole = sum(each for each, is_whole in held if is_whole)
    shared = sum(each for each, is_whole in held if not is_whole)
    # The greatest share of which the least model, n * (share - 1) + 1, fits; then the greatest model of that share.
    share = (memory + whole * (n - 1)) // (whole * n + shared)
    return min(n * share, (memory - shared * share) // whole) if whole else n * share


def _held(stage: int, recipe: Recipe) -> tuple[tuple[int, bool], ...]:
    """Bytes per parameter of parameters, gradients and optimizer states, and whether a rank holds them whole.

    A stage that gathers its parameters once per step holds them whole throughout it, whatever it keeps between steps.
    """
    rule = STAGES[stage]
    return (
        (recipe.parameter, not rule.regather),
        (recipe.gradient, rule.accumulator is Residency.WHOLE),
        (recipe.state, rule.state is Residency.WHOLE),
    )


def _sent(stage: int, recipe: Recipe, m: int) -> int:
    """Bytes sent per parameter and step, without the factor (N - 1) / N. An all-reduce is a reduction and a gather."""
    rule = STAGES[stage]
    reductions = m if rule.reduce_always else 1
    if rule.parameter is Residency.WHOLE:
        return 2 * reductions * recipe.gradient
    gathers = 2 * m if rule.regather else 1
    return reductions * recipe.gradient + gathers * recipe.parameter


def _recipe(precision: str, k: int | None) -> Recipe:
    if precision not in RECIPES:
        near = nearest(str(precision).lower(), list(RECIPES))
        raise SpecError(f"precision {precision!r} does not exist: there are {' and '.join(RECIPES)}{near}")
    recipe = RECIPES[precision]
    return recipe if k is None else replace(recipe, state=_whole_number(k, "k", least=0))


def _whole_number(number: int, what: str, *, least: int = 1) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise SpecError(f"{what} {number!r} must be a whole number, {least} or more")
    return number


def estimate_text(estimates: Sequence[Estimate], *, memory: int | str | None = None) -> str:
    """One row a stage, for estimates of one model; `memory` in bytes per rank adds what fits in it."""
    first, budget = estimates[0], _budget(memory)
    recipe, n, m = first.recipe, first.world, first.micro_batches
    parts = f"{recipe.parameter} + {recipe.gradient} + {recipe.state}"
    head = ("stage", "parameters", "gradients", "optimizer states", "total", "sent", "ideal", "")
    lines: list[tuple[str, ...]] = [head if budget is None else (*head, "fits", "largest model")]
    for each in estimates:
        held = (each.parameter_nbytes, each.gradient_nbytes, each.state_nbytes, each.total_nbytes)
        psi = f"{each.ideal_nbytes // (each.params * recipe.parameter)} psi"
        fits: tuple[str, ...] = ()
        if budget is not None:
            most = _largest(budget, n, each.stage, recipe)
            fits = ("yes" if each.total_nbytes <= budget else "no", format_count(most))
        lines.append((str(each.stage), *map(_gb, held), _gb(each.sent_nbytes), _gb(each.ideal_nbytes), psi, *fits))
    notes = [
        "GB = 1e9 bytes; formulas of Rajbhandari et al., arXiv 1910.02054, sections 3, 5 and 7; "
        "activations, buffers and fragmentation are not in it",
        f"sent per rank and optimizer step, times (N-1)/N = {n - 1}/{n}; ideal: without that factor, as the paper "
        f"prints it; psi = {_gb(first.params * recipe.parameter)} GB of parameters",
    ]
    if m == 1 and {1, 2} <= {each.stage for each in estimates}:
        notes.append(
            "With one micro-batch, a plan of stage 1 gives gradients back bucket by bucket, as stage 2 does: "
            "its row is the paper's bound."
        )
    against = "" if budget is None else f", {_gb(budget)} GB of memory"
    return "\n".join(
        [
            f"estimate: {format_count(first.params)} parameters ({first.params}), world={n} "
            f"precision={recipe.name} ({parts} bytes per parameter) micro-batches={m}",
            f"GB per rank{against}",
            "",
            *table(lines, right=True),
            "",
            *notes,
        ]
    )


def estimate_json(estimates: Sequence[Estimate], *, memory: int | str | None = None) -> dict[str, Any]:
    """The same as a dict for JSON, all of it in bytes and parameters."""
    first, budget = estimates[0], _budget(memory)
    stages = []
    for each in estimates:
        row: dict[str, Any] = {
            "stage": each.stage,
            "parameter_bytes": each.parameter_nbytes,
            "gradient_bytes": each.gradient_nbytes,
            "state_bytes": each.state_nbytes,
            "total_bytes": each.total_nbytes,
            "sent_bytes_per_rank": each.sent_nbytes,
            "ideal_bytes_per_rank": each.ideal_nbytes,
        }
        if budget is not None:
            row["fits"] = each.total_nbytes <= budget
            row["largest_params"] = _largest(budget, each.world, each.stage, each.recipe)
        stages.append(row)
    return {
        "params": first.params,
        "world": first.world,
        "micro_batches": first.micro_batches,
        "precision": asdict(first.recipe),
        "memory_bytes": budget,
        "stages": stages,
    }


def _budget(memory: int | str | None) -> int | None:
    return None if memory is None else parse_size(memory, what="memory")


def _gb(nbytes: int) -> str:
    """
    >>> _gb(31_406_250_000), _gb(2_500_000)
    ('31.41', '0.0025')
    """
    return f"{nbytes / GB:.2f}" if nbytes >= GB // 10 or not nbytes else f"{nbytes / GB:.2g}"
