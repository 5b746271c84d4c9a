"""Every stage, prefetch distance, bucket size and world gives the bits of an unsharded run."""

import functools
import itertools

import pytest

from tests.architectures import ARCHITECTURES, BEYOND, EIGHT, loss_fn
from tests.ranks.training import CASES, Case, assert_same, sharded, unsharded

STAGES = (0, 1, 2, 3)
PREFETCH = (0, 1, 3)
BUCKETS = (4_000, 200_000)
DEPTHS = (1, 2)
MODELS = ("gpt", "odd", "gpt mixed", "odd mixed")
ALL = list(itertools.product(MODELS, (1, 2, 3), STAGES, PREFETCH, BUCKETS, DEPTHS))


def pairwise(rows: list[tuple]) -> list[tuple]:
    """A few rows in which every two values of two columns meet."""
    columns = range(len(rows[0]))
    pairs = [{(i, j, row[i], row[j]) for i, j in itertools.combinations(columns, 2)} for row in rows]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & missing))
        chosen.append(rows[best])
        missing -= pairs[best]
    return chosen


FEW = [*pairwise(ALL), ("gpt autocast", 2, 3, 1, 4_000, 2), ("gpt autocast", 2, 0, 1, 4_000, 2)]
REST = [pytest.param(*row, marks=pytest.mark.slow) for row in ALL if row not in FEW]


@functools.cache
def expected(name: str, world: int):
    return unsharded(CASES[name], world)


@pytest.mark.parametrize(("name", "world", "stage", "prefetch", "bucket", "depth"), [*FEW, *REST])
def test_sharded_equals_unsharded_bit_for_bit(pool, name, world, stage, prefetch, bucket, depth) -> None:
    options = {"stage": stage, "prefetch": prefetch, "bucket": bucket, "depth": depth}
    runs = pool.run(world, sharded, CASES[name], options)
    for run, reference in zip(runs, expected(name, world), strict=True):
        assert_same(run, reference)


# transformers' own models, dropout and all. By default each once at stage 3, and every two values of two options meet
# in one of the eight; in the slow run all plans of the eight.
HF = {name: Case(ARCHITECTURES[name].make, loss_fn, ARCHITECTURES[name].batch) for name in (*EIGHT, *BEYOND)}
OPTIONS = list(itertools.product(STAGES, PREFETCH, BUCKETS, DEPTHS))
ALL_OF_EIGHT = [(name, *options) for name in EIGHT for options in OPTIONS]
MEETING = [(name, *row) for name, row in zip(itertools.cycle(EIGHT), pairwise(OPTIONS), strict=False)]
FEW_OF_HF = list(dict.fromkeys([*MEETING, *((name, 3, 1, 4_000, 2) for name in HF)]))
REST_OF_HF = [pytest.param(*row, marks=pytest.mark.slow) for row in ALL_OF_EIGHT if row not in FEW_OF_HF]


@functools.cache
def expected_of_hf(name: str):
    return unsharded(HF[name], 2)


@pytest.mark.parametrize(("name", "stage", "prefetch", "bucket", "depth"), [*FEW_OF_HF, *REST_OF_HF])
def test_architectures_sharded_equal_unsharded_bit_for_bit(pool, name, stage, prefetch, bucket, depth) -> None:
    options = {"stage": stage, "prefetch": prefetch, "bucket": bucket, "depth": depth}
    runs = pool.run(2, sharded, HF[name], options)
    for run, reference in zip(runs, expected_of_hf(name), strict=True):
        assert_same(run, reference)
