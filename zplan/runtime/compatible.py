"""Compatible: whether a save is one of this model and optimizer. Names the first thing that differs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zplan.errors import SpecError, nearest
from zplan.graph.lift import dtype_name
from zplan.planner.plan import Plan
from zplan.runtime import store
from zplan.runtime.state import State
from zplan.runtime.store import DTYPES, Contents, Manifest


def check(
    manifest: Manifest,
    plan: Plan,
    state: State,
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any],
    not_given: bool,
    root: Path,
) -> None:
    """Raises `SpecError` where the save is of another model, optimizer, groups or schedulers.

    `not_given`: `scheduler` was left out, not said to be none.
    """
    contents = manifest.contents
    _parameters(manifest, plan, state, f"checkpoint {root} is of another model:")
    _buffers(contents, state, f"checkpoint {root} is of another model:")
    _optimizer(contents, plan, optimizer, f"checkpoint {root} is of another optimizer:")
    _states(contents, plan, f"checkpoint {root}:")
    _schedulers(contents, schedulers, not_given, f"checkpoint {root}")


def _parameters(manifest: Manifest, plan: Plan, state: State, where: str) -> None:
    saved = manifest.contents.parameters
    saved_names = {alias: name for name, each in saved.items() for alias in each.aliases}
    names = {alias: t.name for t in plan.graph.tensors for alias in t.aliases}
    for tensor in plan.graph.tensors:
        held = state.held[plan.ownership.home[tensor.name]]
        here = f"{dtype_name(held.dtype)}{list(tensor.shape)}"
        for alias in tensor.aliases:
            if alias not in saved_names:
                near = nearest(alias, [name for name in saved_names if name not in names])
                raise SpecError(f"{where} it has no {alias}, {here} in this model{near}")
            tied = saved_names[alias]
            if tied != saved_names[tensor.name]:
                raise SpecError(f"{where} {alias} is tied to {tensor.name} here, and is a parameter of its own there")
        found = saved.get(tensor.name)
        if found is None or set(found.aliases) != set(tensor.aliases):
            other = saved_names[tensor.name]
            more = sorted(set(saved[other].aliases) - set(tensor.aliases)) or [other]
            raise SpecError(f"{where} {tensor.name} is tied to {', '.join(more)} there, and not here")
        stored = manifest.tensors[store.parameter_key(tensor.name)]
        there = f"{dtype_name(DTYPES[stored.dtype])}{list(found.shape)}"
        if there != here:
            raise SpecError(f"{where} {tensor.name} is {there} there, and {here} here")
    for name in saved_names:
        if name not in names:
            near = nearest(name, [each for each in names if each not in saved_names])
            raise SpecError(f"{where} it has {name}, {list(saved[saved_names[name]].shape)}, and this model none{near}")


def _buffers(contents: Contents, state: State, where: str) -> None:
    """Buffers that are not persistent may differ: they are no part of the model's own state_dict either."""
    here = state.buffer_names()
    for name, buffer in here.items():
        if not buffer.persistent:
            continue
        found = contents.buffers.get(name)
        if found is None:
            near = nearest(name, [each for each in contents.buffers if each not in here])
            raise SpecError(f"{where} it has no buffer {name}, {list(buffer.shape)} in this model{near}")
        if found.shape != buffer.shape:
            raise SpecError(f"{where} buffer {name} is {list(found.shape)} there, and {list(buffer.shape)} here")
    for name, found in contents.buffers.items():
        if found.persistent and name not in here:
            near = nearest(name, [each for each in here if each not in contents.buffers])
            raise SpecError(f"{where} it has a buffer {name}, {list(found.shape)}, and this model none{near}")


def _optimizer(contents: Contents, plan: Plan, optimizer: torch.optim.Optimizer, where: str) -> None:
    there, here = contents.optimizer.name, type(optimizer).__name__
    if there != here:
        raise SpecError(f"{where} {there} there, and {here} here; their states are not the same thing")
    groups = len(contents.optimizer.state)
    if groups != len(optimizer.param_groups):
        raise SpecError(f"{where} {groups} parameter groups there, and {len(optimizer.param_groups)} here")
    for tensor in plan.graph.tensors:
        found = contents.parameters[tensor.name]
        if found.group != tensor.group:
            raise SpecError(f"{where} {tensor.name} is {_group(found.group)} there, and {_group(tensor.group)} here")


def _group(index: int | None) -> str:
    return "in no group (frozen)" if index is None else f"in group {index}"


def _states(contents: Contents, plan: Plan, where: str) -> None:
    """What is updated as one slice has the same states, as many steps old."""
    for bucket in plan.ownership.buckets:
        first: dict[int, str] = {}
        for slot in bucket.slots if bucket.trains else ():
            if slot.group is None or not slot.numel:
                continue
            lead = first.setdefault(slot.group, slot.tensor)
            one, other = contents.parameters[lead], contents.parameters[slot.tensor]
            if (set(one.states), _values(one.scalars)) != (set(other.states), _values(other.scalars)):
                raise SpecError(
                    f"{where} {lead} has the optimizer states {_told(one.states, one.scalars)}, and {slot.tensor} "
                    f"{_told(other.states, other.scalars)}, but here both are updated together\n"
                    "try: a rule with a bucket size of its own for one of them"
                )


def _values(scalars: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(each["value"]) for name, each in scalars.items()}


def _told(states: Sequence[str], scalars: Mapping[str, Any]) -> str:
    return ", ".join([*states, *(f"{name}={each['value']}" for name, each in scalars.items())]) or "(none)"


def _schedulers(contents: Contents, schedulers: Sequence[Any], not_given: bool, where: str) -> None:
    there = [each.name for each in contents.schedulers]
    here = [type(each).__name__ for each in schedulers]
    if not here and not not_given:
        return
    if there != here:
        raise SpecError(
            f"{where} was saved with {_counted(there)}, and is loaded with {_counted(here)}\n"
            "try: the same in scheduler=, or scheduler=() to leave what is saved of them out"
        )


def _counted(names: Sequence[str]) -> str:
    return f"the scheduler {', '.join(names)}" if names else "no scheduler"
