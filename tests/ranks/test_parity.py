"""Every stage, prefetch distance, bucket size and world gives the bits of an unsharded run."""

import functools
import itertools

import pytest

from tests.ranks.training import CASES, assert_same, sharded, unsharded

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
