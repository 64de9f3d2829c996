"""Reading names for people: folding layer numbers, natural order, and the name that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from itertools import product

__all__ = ["Folded", "fold", "natural_key", "nearest", "said_of_all", "template_of"]

# As Python writes numbers: one with a leading zero, or too long for any layer, is text like any other.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,17})(?![^.])")
_DIGITS = re.compile(r"([0-9]+)")
_WORDS = re.compile(r"[^._]+")

_MOST_NUMBERS = 16
"""Names of more numbers are of no model, and are not folded."""

_CLOSER_LOOKS = 24
"""How many candidates are compared letter by letter; the rest are told apart by the words they share."""

_LONGEST = 300
"""Longer names are not compared letter by letter."""


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which numbers compare as numbers; for names of tensors and of files.

    >>> sorted(["h.10", "h.9"], key=natural_key)
    ['h.9', 'h.10']
    """
    return tuple(_part_key(part) for part in _DIGITS.split(name) if part)


def _part_key(part: str) -> tuple[int, int, str]:
    if not _DIGITS.fullmatch(part):
        return 1, 0, part
    # Numbers stay text, for a name may have thousands of digits: the longer of two is the greater one.
    digits = part.lstrip("0")
    return 0, len(digits), digits


def template_of(name: str) -> str:
    """Return `name` with ``*`` for each component that is a number.

    >>> template_of("model.layers.12.mlp.experts.3.w1")
    'model.layers.*.mlp.experts.*.w1'
    """
    return _NUMBER.sub("*", name)


def said_of_all(sentences: Sequence[str]) -> str:
    """Write sentences that differ only in layer numbers as one, with all numbers that stand in one place.

    >>> said_of_all(["h.0.w is h.0.v", "h.1.w is h.1.v"])
    'h.{0,1}.w is h.{0,1}.v'
    """
    between, numbers = _NUMBER.split(sentences[0]), [[*map(int, _NUMBER.findall(s))] for s in sentences]
    axes = [sorted(set(axis)) for axis in zip(*numbers, strict=True)]
    return _written(between, axes) if axes else sentences[0]


@dataclass(frozen=True, slots=True)
class Folded:
    """Several names written as one, and how many they are."""

    text: str
    names: tuple[str, ...]


def fold(names: Iterable[str]) -> list[Folded]:
    """Write names that differ only in layer numbers as one: ``model.layers.{0..31}.mlp``.

    Order is that of first appearance. Names whose numbers are no full grid (experts 0..3 in one layer, 0..2 in
    another) become several texts, so a folded text never claims a name that is not there.

    >>> [f.text for f in fold(["h.0.w", "h.1.w", "h.3.w", "norm"])]
    ['h.{0,1,3}.w', 'norm']
    """
    groups: dict[tuple[str, ...], dict[tuple[int, ...], str]] = {}
    for name in names:
        found = _NUMBER.findall(name)
        if len(found) > _MOST_NUMBERS:
            groups.setdefault((name,), {})[()] = name
        else:
            groups.setdefault(tuple(_NUMBER.split(name)), {})[tuple(map(int, found))] = name
    return [
        Folded(_written(between, axes), tuple(members[numbers] for numbers in product(*axes)))
        for between, members in groups.items()
        for axes in _grids(members)
    ]


def _grids(points: Collection[tuple[int, ...]]) -> Iterator[list[list[int]]]:
    """Yield grids (the numbers along each axis) that hold every point once and nothing else."""
    if () in points:
        yield []
        return
    lines: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in points:
        lines.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, line in lines.items():
        alike.setdefault(tuple(sorted(line)), []).append(first)
    for line_of, firsts in alike.items():
        for tail in _grids(line_of):
            yield [sorted(firsts), *tail]


def _written(between: Sequence[str], axes: Sequence[Sequence[int]]) -> str:
    return between[0] + "".join(_numbers(axis) + text for axis, text in zip(axes, between[1:], strict=True))


def _numbers(axis: Sequence[int]) -> str:
    if len(axis) == 1:
        return str(axis[0])
    shown = list(_runs(axis))
    if len(shown) > 6:
        shown = [*shown[:3], "…", *shown[-2:]]
    return "{" + ",".join(shown) + "}"


def _runs(axis: Sequence[int]) -> Iterator[str]:
    """Yield ``a..b`` for three or more numbers that follow each other, and other numbers one by one."""
    first = 0
    for i in range(1, len(axis) + 1):
        if i == len(axis) or axis[i] != axis[i - 1] + 1:
            run = axis[first:i]
            yield from [f"{run[0]}..{run[-1]}"] if len(run) > 2 else map(str, run)
            first = i


def nearest(name: str, candidates: Collection[str], limit: int = 3) -> tuple[str, ...]:
    """Return up to `limit` candidates that `name` may have been meant for, best first.

    A candidate that ends like `name`, or `name` like it, comes before one that is merely spelled alike.

    >>> nearest("lm_head.weight", ["model.model.lm_head.weight", "model.norm.weight"])
    ('model.model.lm_head.weight',)
    """
    others = [c for c in candidates if c != name]
    nested = [c for c in others if c.endswith("." + name) or name.endswith("." + c)]
    nested.sort(key=lambda c: abs(len(c) - len(name)))
    others = [c for c in others if len(c) <= _LONGEST]
    if len(name) > _LONGEST or not others:
        return tuple(nested[:limit])
    if len(others) > 4 * _CLOSER_LOOKS:
        words = _words(name)
        others = nlargest(_CLOSER_LOOKS, others, key=lambda c: 2 * len(words & _words(c)) - len(_words(c)))
    alike = difflib.get_close_matches(name, others, n=limit, cutoff=0.75)
    return tuple(dict.fromkeys((*nested, *alike)))[:limit]


@lru_cache(maxsize=1 << 14)
def _words(name: str) -> frozenset[str]:
    return frozenset(_WORDS.findall(name))
