"""What a user hands in to a save comes back as it was, type for type."""

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import EXAMPLES
from zplan.errors import SpecError
from zplan.runtime.encode import decode, encode

keys = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.sampled_from(("zplan", "items")), inner, max_size=2),
        st.dictionaries(st.text(max_size=2), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=8,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    written = json.dumps(encode(value, "extra", tensors), allow_nan=False)
    return decode(json.loads(written), lambda key: tensors[key].reshape(-1))


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return all(map(same, a, b)) and all(map(same, a.values(), b.values())) and len(a) == len(b)
    return bool(a == b)


@EXAMPLES
@given(values)
def test_plain_values_come_back(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_tensors_come_back_in_their_dtype_and_shape() -> None:
    given_ = {"a": [torch.arange(6).view(2, 3), (torch.ones((), dtype=torch.bfloat16),)], "b": torch.empty(0, 3)}
    found = there_and_back(given_)
    for mine, theirs in zip(
        (*found["a"][:1], *found["a"][1], found["b"]), (*given_["a"][:1], *given_["a"][1], given_["b"]), strict=True
    ):
        assert torch.equal(mine, theirs)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    assert there_and_back(np.float64(0.5)) == 0.5


def test_what_cannot_come_back_is_named() -> None:
    with pytest.raises(SpecError, match=r"extra\.a\[1\] is a builtins\.set, and a save takes numbers"):
        encode({"a": [0, {1}]}, "extra", {})
    with pytest.raises(SpecError, match=r"extra has the key \(1, 2\), a tuple: keys are strings or numbers"):
        encode({(1, 2): 0}, "extra", {})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SpecError, match="is nested deeper than 100: does it hold itself"):
        encode(loop, "extra", {})
