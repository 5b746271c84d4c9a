"""Borrow: a user's model for the time of one call. What the forward leaves on modules is put back, and told."""

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zplan.graph import compat

_CONTAINERS = (list, set, dict, OrderedDict, defaultdict, deque)
_MISSING = object()
_DROPPED = "the change is dropped"
_SEEN_AS_BEFORE = f"every step sees it as it was, {_DROPPED}"


@dataclass
class Changes:
    """What a forward left on modules, and `borrowed` took away again.

    `replaced`: tensors, by id, that were plain attributes and are others now, with their names. `notes`: in words.
    """

    replaced: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@contextmanager
def borrowed(model: nn.Module) -> Iterator[Changes]:
    """Puts back every attribute of every module, and torch's random state, also after an error.

    What it gives is filled at the end.
    """
    changes = Changes()
    kept = [_Before(name, module) for name, module in model.named_modules()]
    try:
        started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count()) if started else []
        with torch.random.fork_rng(devices=devices):
            yield changes
    finally:
        for before in kept:
            before.put_back(changes)


class _Before:
    """A module as it was: its attributes, and what its lists, sets and dicts hold, hooks and submodules among them."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.now = vars(module)
        self.attributes = dict(self.now)
        self.contents = {key: copy(value) for key, value in self.now.items() if type(value) in _CONTAINERS}

    def put_back(self, changes: Changes) -> None:
        for key, content in self.contents.items():
            container = self.attributes[key]
            if _same(container, content):
                continue
            if key not in compat.OF_MODULE:
                changes.notes.append(f"{self._full(key)} is changed by the forward: {_SEEN_AS_BEFORE}")
            elif key in compat.TENSORS_OF_MODULE:
                added = [name for name in container if name not in content]
                changes.notes += [f"{self._full(name)} is set by the forward: {_DROPPED}" for name in added]
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        changed = [
            key
            for key in {**self.attributes, **self.now}
            if self.now.get(key, _MISSING) is not self.attributes.get(key, _MISSING)
        ]
        for key in changed:
            before = self.attributes.get(key, _MISSING)
            if isinstance(before, torch.Tensor):
                changes.replaced[id(before)] = self._full(key)
            if words := _change(key, before, self.now.get(key, _MISSING)):
                changes.notes.append(f"{self._full(key)} is {words}")
        if changed:
            self.now.clear()
            self.now.update(self.attributes)

    def _full(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


def _change(key: str, before: Any, after: Any) -> str:
    """What became of an attribute, "" where it is nothing to tell: an equal value, or a cache made on first use."""
    if before is None or before is False or before is _MISSING:
        if key.startswith("_"):
            return ""
        if before is _MISSING:
            return f"set by the forward: {_DROPPED}"
    plain = [isinstance(value, (type(None), bool, int, float)) for value in (before, after)]
    if all(plain):
        equal = type(before) is type(after) and before == after
        return "" if equal else f"changed by the forward ({before} -> {after}): every step sees {before}, {_DROPPED}"
    return f"changed by the forward: {_SEEN_AS_BEFORE}"


def _same(a: Any, b: Any) -> bool:
    """Whether two containers hold the very same objects, in the same order."""
    if isinstance(a, set):
        return bool(a == b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(value is b[key] for key, value in a.items())
    return len(a) == len(b) and all(map(operator.is_, a, b))
