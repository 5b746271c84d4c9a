"""Encode: what a user hands in to be saved, as JSON with its tensors apart, and back without loss; no pickle.

Dicts, lists, tuples, numbers, strings, booleans, None, Counters and tensors, as deep as they go. JSON has no tuples,
no infinities and only strings for keys: these are written as `{"zplan": "tuple", ...}`.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from zplan.errors import SpecError
from zplan.runtime.store import DTYPES, word_of

MARK = "zplan"
DEEPEST = 100


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """`where`: the user's name of it, for errors and for the keys under which its tensors are added to `tensors`."""
    if depth > DEEPEST:
        raise SpecError(f"{where} is nested deeper than {DEEPEST}: does it hold itself?")
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {MARK: "float", "value": str(value)}
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value, where, tensors)
    if kind in (list, tuple):
        items = [encode(item, f"{where}[{i}]", tensors, depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {MARK: "tuple", "items": items}
    if kind in (dict, OrderedDict, Counter):
        if kind is not Counter and all(type(key) is str for key in value) and MARK not in value:
            return {key: encode(item, f"{where}.{key}", tensors, depth + 1) for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            if key is not None and type(key) not in (bool, int, float, str):
                raise SpecError(f"{where} has the key {key!r}, a {type(key).__name__}: keys are strings or numbers")
            pairs.append(
                [
                    encode(key, f"a key of {where}", tensors, depth + 1),
                    encode(item, f"{where}[{key!r}]", tensors, depth + 1),
                ]
            )
        return {MARK: "counter" if kind is Counter else "dict", "items": pairs}
    if isinstance(value, np.generic):
        return encode(value.item(), where, tensors, depth + 1)
    raise SpecError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, and a save takes numbers, strings, tensors, and dicts, "
        "lists and tuples of them: save what it is made from"
    )


def _tensor(value: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value.layout is not torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise SpecError(f"{where} is a {type(value).__name__} of layout {value.layout}: give a plain, dense tensor")
    key = where
    while key in tensors:
        key += "'"
    tensors[key] = value.detach()
    return {MARK: "tensor", "key": key, "dtype": word_of(value.dtype, where), "shape": list(value.shape)}


def decode(value: Any, fetch: Callable[[str], torch.Tensor]) -> Any:
    """`fetch`: a tensor's key -> its elements, flat."""
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    mark = value.get(MARK)
    if mark is None:
        return {key: decode(item, fetch) for key, item in value.items()}
    if mark == "tensor":
        flat = fetch(value["key"]) if 0 not in value["shape"] else torch.empty(0, dtype=DTYPES[value["dtype"]])
        return flat.view(value["shape"])
    if mark == "tuple":
        return tuple(decode(item, fetch) for item in value["items"])
    if mark == "float":
        return float(value["value"])
    pairs = {decode(key, fetch): decode(item, fetch) for key, item in value["items"]}
    return Counter(pairs) if mark == "counter" else pairs
