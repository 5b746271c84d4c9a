"""One pool of ranks for the whole run."""

from collections.abc import Iterator

import pytest

from tests.ranks.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()
