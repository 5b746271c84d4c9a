"""Fold: lines that are the same but for their numbers become one, so that a page stays a page at any depth.

Glossary: a *label* names things, and its numbers may count from one repeat to the next (`b3 = blocks.2.*`); its
*template* is the label without its numbers; a *block* is some rows, printed once for all their repeats.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import sub

# Two repeats are read faster than they are decoded.
LEAST_REPEATS = 3
# Periods that are tried: all short ones, and the most frequent distances of a row from the last few rows like it.
SHORT = 8
FREQUENT = 24
LOOK_BACK = 4
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a schedule: instructions `first` to `last`.

    `flight` has one sign for each collective: `>` starts, `|` is in flight, `<` is waited for. `label` is what may
    count; `detail` may not, nor may `sent`, the bytes that this rank sends. `live` is what is alive after the row, or
    the peak where `mark` says so.
    """

    first: int
    last: int
    flight: str
    verb: str
    label: str
    detail: str
    sent: int
    live: int
    mark: str = ""

    @property
    def text(self) -> str:
        return self.label + self.detail


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `[start, start + period)`, which come `times` times in all, one repeat after the other."""

    start: int
    period: int
    times: int


def fold(rows: Sequence[Row]) -> list[Block]:
    """Covers the rows with blocks, so that few lines are printed.

    gather b0; run layers.0 (9 ops); gather b1; run layers.1 (9 ops); gather b2; run layers.2 (9 ops)
        ->  x3: gather b0..2; run layers.0..2 (9 ops)

    A block stands for exactly what it replaces: kinds, counts of ops and of instructions, and bytes sent are equal in
    each repeat, and each number of a label goes up or down by one constant step. Only `live` may differ.
    """
    keys = [_key(row) for row in rows]
    numbers = [_numbers(row.label) for row in rows]
    runs = [(period, _run_lengths(keys, numbers, period)) for period in _periods(keys)]
    lines = [0] * (len(rows) + 1)
    chosen = [Block(i, 1, 1) for i in range(len(rows))]
    for i in reversed(range(len(rows))):
        lines[i] = 1 + lines[i + 1]
        for period, run in runs:
            times = 2 + run[i] // period
            if times < LEAST_REPEATS:
                continue
            count = period + lines[i + period * times]
            if count < lines[i] or (count == lines[i] and chosen[i].times == 1):
                lines[i] = count
                chosen[i] = Block(i, period, times)
    return list(_follow(chosen))


def _follow(chosen: Sequence[Block]) -> Iterator[Block]:
    i = 0
    while i < len(chosen):
        yield chosen[i]
        i += chosen[i].period * chosen[i].times


def _key(row: Row) -> tuple[object, ...]:
    """What must be equal in each repeat; a row that is marked equals no other."""
    return (row.flight, row.verb, template(row.label), row.detail, row.sent, row.last - row.first, row.mark)


def _periods(keys: Sequence[object]) -> list[int]:
    """Short periods, and the most frequent distances between rows with one key; shortest first."""
    seen: dict[object, deque[int]] = {}
    distances: Counter[int] = Counter()
    for i, key in enumerate(keys):
        before = seen.setdefault(key, deque(maxlen=LOOK_BACK))
        distances.update(i - j for j in before)
        before.append(i)
    frequent = sorted(distances, key=lambda distance: (-distances[distance], distance))
    return sorted({*range(1, SHORT + 1), *frequent[:FREQUENT]})


def _run_lengths(keys: Sequence[object], numbers: Sequence[tuple[int, ...]], period: int) -> list[int]:
    """For each row, how many from it on are in step with those one and two periods later."""
    lengths = [0] * (len(keys) + 1)
    for i in reversed(range(len(keys) - 2 * period)):
        j, k = i + period, i + 2 * period
        if keys[i] == keys[j] == keys[k] and _steps(numbers[i], numbers[j]) == _steps(numbers[j], numbers[k]):
            lengths[i] = lengths[i + 1] + 1
    return lengths


def _steps(before: tuple[int, ...], after: tuple[int, ...]) -> list[int]:
    return list(map(sub, after, before))


def template(label: str) -> str:
    """The label without its numbers.

    >>> template("b3 = blocks.2.*")
    'b# = blocks.#.*'
    """
    return _NUMBER.sub("#", label)


def span(labels: Sequence[str]) -> str:
    """Labels of one template, as one.

    >>> span(["b3 = blocks.2.*", "b4 = blocks.3.*", "b5 = blocks.4.*"])
    'b3..5 = blocks.2..4.*'
    >>> span(["b10:grad", "b8:grad", "b6:grad"]), span(["b0", "b1", "b5"]), span(["blocks.0..3", "blocks.4..7"])
    ('b10,8..6:grad', 'b0,1,5', 'blocks.0..3 to blocks.4..7')
    """
    first, last = labels[0], labels[-1]
    if first == last:
        return first
    if ".." in first:
        return f"{first} to {last}"
    between = _NUMBER.split(first)
    columns = [_count(column) for column in zip(*map(_numbers, labels), strict=True)]
    return "".join(words + count for words, count in zip(between, [*columns, ""], strict=True))


def families(labels: Iterable[str]) -> dict[str, list[str]]:
    """Labels by template, in order of appearance."""
    found: dict[str, list[str]] = {}
    for label in labels:
        found.setdefault(template(label), []).append(label)
    return found


def in_order(labels: Iterable[str]) -> list[str]:
    """
    >>> in_order(["b10", "b9", "a"])
    ['a', 'b9', 'b10']
    """
    return sorted(labels, key=lambda label: (template(label), _numbers(label)))


def _numbers(label: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(label)))


def _count(column: Sequence[int]) -> str:
    """Numbers that count by one as `0..11`, by another step as `0,2..22`, few others one by one, many as `*`."""
    distinct = list(dict.fromkeys(column))
    steps = set(map(sub, distinct[1:], distinct))
    if len(steps) == 1 and steps <= {1, -1}:
        return f"{distinct[0]}..{distinct[-1]}"
    if len(steps) == 1 and len(distinct) > 2:
        return f"{distinct[0]},{distinct[1]}..{distinct[-1]}"
    return ",".join(map(str, distinct)) if len(distinct) <= LEAST_REPEATS else "*"
