"""Reading names for people: folding layer numbers, natural order, and the name that was probably meant."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["Folded", "fold", "natural_key", "nearest", "template_of"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_DIGITS = re.compile(r"(\d+)")


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key under which numbers compare as numbers.

    >>> sorted(["h.10", "h.9"], key=natural_key)
    ['h.9', 'h.10']
    """
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in _DIGITS.split(name) if part)


def template_of(name: str) -> str:
    """Return `name` with ``*`` for each component that is a number.

    >>> template_of("model.layers.12.mlp.experts.3.w1")
    'model.layers.*.mlp.experts.*.w1'
    """
    return _NUMBER.sub("*", name)


@dataclass(frozen=True, slots=True)
class Folded:
    """Several names written as one, and how many they are."""

    text: str
    names: tuple[str, ...]


def fold(names: Iterable[str]) -> list[Folded]:
    """Write names that differ only in layer numbers as one: ``model.layers.{0..31}.mlp``.

    Order is that of first appearance. Names whose numbers are no full grid (layers 0..3 of one and 2 of
    another) are folded per outer number instead, so a folded text never claims a name that is not there.

    >>> [f.text for f in fold(["h.0.w", "h.1.w", "h.3.w", "norm"])]
    ['h.{0,1,3}.w', 'norm']
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        groups[template_of(name)].append(name)
    return [folded for template, members in groups.items() for folded in _fold_group(template, members)]


def _fold_group(template: str, members: list[str]) -> list[Folded]:
    if len(members) == 1:
        return [Folded(members[0], tuple(members))]
    numbers = {name: tuple(map(int, _NUMBER.findall(name))) for name in members}
    axes = [sorted(set(axis)) for axis in zip(*numbers.values(), strict=True)]
    if prod(map(len, axes)) == len(members):
        return [Folded(_written(template, axes), tuple(members))]
    by_first: dict[int, list[str]] = defaultdict(list)
    open_axis = len(axes) - template.count("*")
    for name in members:
        by_first[numbers[name][open_axis]].append(name)
    return [f for first, some in by_first.items() for f in _fold_group(template.replace("*", str(first), 1), some)]


def _written(template: str, axes: Sequence[Sequence[int]]) -> str:
    for axis in axes[len(axes) - template.count("*") :]:
        template = template.replace("*", _numbers(axis), 1)
    return template


def _numbers(axis: Sequence[int]) -> str:
    if len(axis) == 1:
        return str(axis[0])
    if len(axis) > 2 and axis[-1] - axis[0] == len(axis) - 1:
        return f"{{{axis[0]}..{axis[-1]}}}"
    shown = [str(n) for n in axis]
    if len(shown) > 6:
        shown = [*shown[:3], "…", *shown[-2:]]
    return "{" + ",".join(shown) + "}"


def nearest(name: str, candidates: Collection[str], limit: int = 3) -> tuple[str, ...]:
    """Return up to `limit` candidates that `name` may have been meant for, best first.

    A candidate that ends like `name`, or `name` like it, comes before one that is merely spelled alike.

    >>> nearest("lm_head.weight", ["model.model.lm_head.weight", "model.norm.weight"])
    ('model.model.lm_head.weight',)
    """
    nested = [c for c in candidates if c != name and (c.endswith("." + name) or name.endswith("." + c))]
    if len(candidates) > 2000:
        last = name.rpartition(".")[2]
        candidates = [c for c in candidates if c.endswith(last)][:2000]
    alike = difflib.get_close_matches(name, [c for c in candidates if c != name], n=limit, cutoff=0.75)
    return tuple(dict.fromkeys((*sorted(nested, key=len), *alike)))[:limit]
