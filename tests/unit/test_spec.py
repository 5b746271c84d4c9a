from typing import Any

import pytest
from pydantic import ValidationError

from zplan.errors import SpecError
from zplan.planner.spec import Schedule, Spec, make_spec

GOOD = {"stage": 3, "world_size": 4, "bucket": "25MB", "prefetch": 1, "depth": 2, "native_all_reduce": False}


def spec(**options: Any) -> Spec:
    return make_spec(**{**GOOD, **options})


def test_make_spec() -> None:
    assert spec(stage="2") == Spec(
        stage=2, world_size=4, bucket=25_000_000, schedule=Schedule(prefetch=1, depth=2, native_all_reduce=False)
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 4}, "stage 4 does not exist: there are 0, 1, 2 and 3"),
        ({"stage": "auto"}, "stage 'auto' is not there yet: choose 0, 1, 2 or 3"),
        ({"world_size": 0}, "world_size 0: input should be greater than or equal to 1"),
        ({"world_size": 2.5}, "world_size 2.5: input should be a valid integer"),
        ({"bucket": "large"}, "bucket 'large' is no size: write bytes, '25MB' or '80GiB'"),
        ({"bucket": 0}, "bucket 0 must be above zero"),
        ({"prefetch": -1}, "prefetch -1: input should be greater than or equal to 0"),
        ({"depth": 0}, "depth 0: input should be greater than or equal to 1"),
        ({"bugdet": "80GB"}, "bugdet '80GB': extra inputs are not permitted"),
    ],
)
def test_make_spec_refuses_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(**options)
    assert str(caught.value).startswith(words)


def test_a_spec_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        spec().stage = 1  # type: ignore[misc]
