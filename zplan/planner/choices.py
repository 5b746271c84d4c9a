"""Choices: which stage and bucket size each tensor gets, by rule, by annotation or by default, and because of what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from zplan.errors import SpecError, nearest
from zplan.graph.ir import Graph, Tensor
from zplan.planner.spec import Rule

# What a rule may say, and where in the words it stands.
_SAYS = ("stage", "bucket", "keep")
# At stage 3 a kept parameter is not gathered again for backward: that is stage 2, and printed so.
KEPT = {3: 2}


@dataclass(frozen=True, slots=True)
class Choice:
    """The stage of a tensor, the bytes it may travel in (None: as all), and the words that say where they come from."""

    stage: int
    because: str
    bucket: int | None = None


def choose(graph: Graph, *, default: int, rules: Sequence[Rule] = (), auto: bool = False) -> Mapping[str, Choice]:
    """Gives every tensor its choice: rules go before the innermost annotation, and that before the default.

    Any name of a tied tensor matches; where its names would get different answers that is an error, and so is a rule
    that matches no name.
    """
    names = [alias for tensor in graph.tensors for alias in tensor.aliases]
    for index, rule in enumerate(rules, 1):
        if not any(fnmatchcase(name, rule.pattern) for name in names):
            near = nearest(rule.pattern.replace("*", ""), names) or f"; the first of them is {names[0]}"
            raise SpecError(f"rule {index} {rule.pattern!r} matches no parameter{near}")
    otherwise = Choice(default, f"{'auto' if auto else 'default'}: stage {default}")
    return {tensor.name: _choose(tensor, rules, _annotated(graph, tensor) or otherwise) for tensor in graph.tensors}


def unused(graph: Graph, rules: Sequence[Rule]) -> tuple[str, ...]:
    """Rules that match, but decide nothing because others come before them."""
    deciding = {
        index for tensor in graph.tensors for says in _SAYS for index in _by_alias(tensor, rules, says).values()
    }
    return tuple(
        f"rule {index + 1}: {rule.pattern} decides nothing: rules before it match first"
        for index, rule in enumerate(rules)
        if index not in deciding
    )


def _choose(tensor: Tensor, rules: Sequence[Rule], otherwise: Choice) -> Choice:
    by = {says: _ruled(tensor, rules, says) for says in _SAYS}
    stage, because = otherwise.stage, otherwise.because
    if (index := by["stage"]) is not None:
        stage, because = rules[index].stage or 0, _rule(rules, index)
    bucket = None
    if (index := by["bucket"]) is not None:
        bucket = rules[index].bucket
        because += "" if index == by["stage"] else f"; bucket by {_rule(rules, index)}"
    if (index := by["keep"]) is not None and rules[index].keep and stage in KEPT:
        because += f"; stage {stage} kept" + ("" if index == by["stage"] else f" by {_rule(rules, index)}")
        stage = KEPT[stage]
    return Choice(stage, because, bucket)


def _rule(rules: Sequence[Rule], index: int) -> str:
    return f"rule {index + 1}: {rules[index].pattern}"


def _ruled(tensor: Tensor, rules: Sequence[Rule], says: str) -> int | None:
    """The index of the rule that decides, or None."""
    found = _by_alias(tensor, rules, says)
    answers: dict[Any, str] = {}
    for alias, index in found.items():
        answers.setdefault(getattr(rules[index], says), f"{alias} by rule {index + 1}: {getattr(rules[index], says)}")
    if len(answers) > 1:
        raise SpecError(
            f"tied parameter {tensor.name} gets different answers for {says} ({', '.join(answers.values())}): "
            "name it in one rule before both"
        )
    return next(iter(found.values()), None)


def _by_alias(tensor: Tensor, rules: Sequence[Rule], says: str) -> dict[str, int]:
    """Name of the tensor -> the first rule that matches it and says something of `says`."""
    found: dict[str, int] = {}
    for alias in tensor.aliases:
        for index, rule in enumerate(rules):
            if getattr(rule, says) is not None and fnmatchcase(alias, rule.pattern):
                found[alias] = index
                break
    return found


def _annotated(graph: Graph, tensor: Tensor) -> Choice | None:
    found: dict[str, str] = {}
    for alias in tensor.aliases:
        holder = innermost(graph.stages, alias)
        if holder is not None:
            found[alias] = holder
    stages = {graph.stages[holder] for holder in found.values()}
    if len(stages) > 1:
        where = ", ".join(f"{alias}: stage {graph.stages[holder]}" for alias, holder in found.items())
        raise SpecError(f"tied parameter {tensor.name} is annotated with different stages ({where}): give it one stage")
    if not stages:
        return None
    holder = next(iter(found.values()))
    return Choice(stages.pop(), f"annotate: {holder or 'model'}")


def innermost(annotated: Mapping[str, int], name: str) -> str | None:
    """The deepest annotated module around a parameter's name, or None; "" is the model itself."""
    parts = name.split(".")[:-1]
    for depth in range(len(parts), -1, -1):
        module = ".".join(parts[:depth])
        if module in annotated:
            return module
    return None
