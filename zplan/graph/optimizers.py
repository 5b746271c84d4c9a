"""Optimizers: several optimizers, each for the parameters that its pattern names, as one."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import torch
from torch import optim

from zplan.errors import SpecError, nearest


class Optimizers(optim.Optimizer):
    """Steps each of `optimizers` in turn. Groups are the very groups of all of them, in order: what a scheduler edits
    here holds there. State is kept by each of them, and shown and loaded together."""

    def __init__(self, optimizers: Sequence[optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        # Schedulers ask here for `momentum` or `betas`: whether all groups have them.
        first, *others = (each.defaults for each in self.optimizers)
        defaults = {key: value for key, value in first.items() if all(key in other for other in others)}
        # What torch makes of an unpickled optimizer: its hooks. Its constructor would make groups and state of its own.
        super().__setstate__({"defaults": defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:  # type: ignore[override]
        return _States(self.optimizers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise SpecError("add_param_group: each optimizer's factory makes its groups, and they stay as they are")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Groups and state of all, as torch's `load_state_dict` has put them together: each takes its own."""
        groups = iter(state["param_groups"])
        for each in self.optimizers:
            own = list(islice(groups, len(each.param_groups)))
            held = {parameter for group in own for parameter in group["params"]}
            kept = defaultdict(dict, {key: value for key, value in state["state"].items() if key in held})
            each.__setstate__({"state": kept, "param_groups": own})

    def __reduce__(self) -> Any:
        return type(self), (self.optimizers,)


class _States(MutableMapping[torch.Tensor, Any]):
    """Parameter -> its state, in the optimizer that it is a parameter of."""

    def __init__(self, optimizers: Sequence[optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, key: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for each in self._optimizers:
            if any(parameter is key for group in each.param_groups for parameter in group["params"]):
                return each.state
        raise KeyError(key)

    def __getitem__(self, key: torch.Tensor) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: torch.Tensor) -> None:
        del self._of(key)[key]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (key for each in self._optimizers for key in each.state)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)

    def __repr__(self) -> str:
        return repr(dict(self))


def assign(
    factories: Mapping[str, Any], parameters: Mapping[str, tuple[str, ...]], trained: Sequence[str]
) -> Mapping[str, tuple[str, ...]]:
    """Pattern -> the trained parameters it names; patterns that leave nothing to do are left out.

    `parameters`: name -> all of its names. The first pattern that matches a name wins; where the names of a tied
    parameter get different factories, that is an error, and so is a pattern that matches nothing that trains, or only
    what patterns before it match.
    """
    if not factories:
        raise SpecError(
            "the optimizer is a mapping that holds nothing: give it patterns, as {'*.bias': sgd, '*': adamw}"
        )
    for pattern in factories:
        if not isinstance(pattern, str):
            raise SpecError(f"the optimizer is a mapping with the key {pattern!r}: give patterns of parameters' names")
    winner = {name: _winner(name, factories, parameters[name]) for name in trained}
    made: dict[str, tuple[str, ...]] = {}
    for index, pattern in enumerate(factories, 1):
        what = f"optimizer pattern {index} {pattern!r}"
        matched = [name for name, aliases in parameters.items() if _matches(pattern, aliases)]
        trains = [name for name in matched if name in winner]
        if not matched:
            names = [alias for aliases in parameters.values() for alias in aliases]
            near = nearest(pattern.replace("*", ""), names) or f"; the first of them is {names[0]}"
            raise SpecError(f"{what} matches no parameter{near}")
        if not trains:
            raise SpecError(f"{what} matches frozen parameters alone, as {matched[0]}: leave it out")
        own = tuple(name for name in trained if winner[name] == pattern)
        before = [winner[name] for name in trains if factories[winner[name] or ""] is not factories[pattern]]
        if not own and before:
            raise SpecError(f"{what} gets no parameter: {before[0]!r} before it matches first; put it before that")
        if own:
            made[pattern] = own
    return made


def _winner(name: str, factories: Mapping[str, Any], aliases: Sequence[str]) -> str | None:
    """The pattern that decides for a parameter, or None."""
    found = {alias: next((p for p in factories if fnmatchcase(alias, p)), None) for alias in aliases}
    matched = {alias: pattern for alias, pattern in found.items() if pattern is not None}
    if len({id(factories[pattern]) for pattern in matched.values()}) > 1:
        answers = ", ".join(f"{alias} by {pattern!r}" for alias, pattern in matched.items())
        raise SpecError(
            f"tied parameter {name} gets different optimizers ({answers}): name all of these in patterns with the same "
            "factory, before the others"
        )
    return next((pattern for pattern in factories if pattern in matched.values()), None)


def _matches(pattern: str, aliases: Sequence[str]) -> bool:
    return any(fnmatchcase(alias, pattern) for alias in aliases)
