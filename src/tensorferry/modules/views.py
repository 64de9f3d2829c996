"""Strided copies as values: what a chain of views and copies does to positions. Whether these are a region, `regions`
says.

Pure integer geometry about element positions in the memory of tensors; which tensors they are is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import itemgetter
from typing import NamedTuple

from tensorferry.core.boxes import Region, strides_of

__all__ = ["Axis", "Copy", "TooScattered", "between", "in_order", "rounds", "through"]

MANY = 256
"""Most copies that one copy is split into before it counts as no plain copy."""


class TooScattered(Exception):
    """The elements lie so irregularly that they are no small number of regular copies."""


class Axis(NamedTuple):
    """One loop of a copy: `size` steps of `into` and `source` elements."""

    size: int
    into: int
    source: int


_BY_STEPS = itemgetter(1, 2)


@dataclass(frozen=True, slots=True)
class Copy:
    """Nested loops, outermost first, that copy element ``source + Σ iₖ·sourceₖ`` to ``into + Σ iₖ·intoₖ``."""

    into: int
    source: int
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, shape: Sequence[int], into: tuple[int, Sequence[int]], source: tuple[int, Sequence[int]]) -> Copy:
        """Return the copy between two views of `shape`, each given by its offset and strides in elements."""
        axes = [Axis(n, a, b) for n, a, b in zip(shape, into[1], source[1], strict=True) if n != 1]
        return cls(into[0], source[0], tuple(axes))

    @classmethod
    def whole(cls, size: int) -> Copy:
        """Return the copy of `size` elements that lie behind each other."""
        return cls(0, 0, (Axis(size, 1, 1),))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod([a.size for a in self.axes])

    @property
    def last(self) -> int:
        """The last position that is written."""
        return self.into + sum([(a.size - 1) * a.into for a in self.axes])

    @property
    def image(self) -> Copy:
        """The copy of the written elements onto themselves."""
        return Copy(self.into, self.into, tuple(Axis(a.size, a.into, a.into) for a in self.axes))

    @property
    def constant(self) -> Copy:
        """The copy of one element to all that are written."""
        return Copy(self.into, 0, tuple(a._replace(source=0) for a in self.axes))

    @property
    def nested(self) -> bool:
        """Whether what is written is a grid in which each loop stays within one step of the one around it.

        Only such copies can be looked `through`. A tidy copy is expected.
        """
        return all(a.into > 0 for a in self.axes) and all(
            a.into % b.into == 0 and a.into >= b.into * b.size for a, b in pairwise(self.axes)
        )

    def cut(self, which: int, start: int, stop: int) -> Copy:
        """Return the part of the copy in which loop `which` runs from `start` to `stop`."""
        axis = self.axes[which]
        kept = () if stop - start == 1 else (axis._replace(size=stop - start),)
        axes = (*self.axes[:which], *kept, *self.axes[which + 1 :])
        return Copy(self.into + start * axis.into, self.source + start * axis.source, axes)

    def tidy(self) -> Copy:
        """Return the same copy with its loops in the order of what is written, and as few as can be."""
        if not self.axes or (len(self.axes) == 1 and self.axes[0].size != 1):
            return self
        merged: list[Axis] = []
        for axis in sorted([a for a in self.axes if a.size != 1], key=_BY_STEPS, reverse=True):
            outer = merged[-1] if merged else None
            if outer and (outer.into, outer.source) == (axis.into * axis.size, axis.source * axis.size):
                merged[-1] = Axis(outer.size * axis.size, axis.into, axis.source)
            else:
                merged.append(axis)
        return Copy(self.into, self.source, tuple(merged))


def between(into: Region, source: Region) -> Copy:
    """Return the copy of a region to another of as many elements, both in their row-major order.

    Raises TooScattered where the dimensions of one do not divide those of the other.
    """
    starts = [sum(a * s for a, s in zip(r.box.start, strides_of(r.view), strict=True)) for r in (into, source)]
    left, right = _loops(into), _loops(source)
    axes: list[Axis] = []
    while left and right:
        (n, a), (m, b) = left.pop(), right.pop()
        size = min(n, m)
        if n % size or m % size:
            raise TooScattered
        axes.append(Axis(size, a, b))
        left += [(n // size, a * size)] if n > size else []
        right += [(m // size, b * size)] if m > size else []
    return Copy(starts[0], starts[1], tuple(reversed(axes)))


def _loops(region: Region) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(region.shape, strides_of(region.view), strict=True) if n != 1]


class _Grid:
    """The positions that a nested copy writes, as digits: one for each of its loops, the outermost without bound."""

    def __init__(self, copy: Copy) -> None:
        has_holes = not copy.axes or copy.axes[-1].into != 1
        self.origin = copy.into
        self.axes = (*copy.axes, Axis(1, 1, 0)) if has_holes else copy.axes
        self.source = copy.source

    def digits(self, position: int) -> list[int]:
        """Return `position` relative to the origin, written in steps of the loops."""
        rest, found = position - self.origin, []
        for axis in self.axes:
            digit, rest = divmod(rest, axis.into)
            found.append(digit)
        return found

    def digit_of(self, step: int) -> int:
        """Return which digit a walk in steps of `step` counts up: the largest unit that divides it."""
        return next(k for k, axis in enumerate(self.axes) if step % axis.into == 0)

    def radix(self, k: int) -> int:
        """Return how many values digit `k` has before it carries into the one before it; 0 for no bound."""
        return self.axes[k - 1].into // self.axes[k].into if k else 0


def through(copy: Copy, inner: Copy) -> list[Copy]:
    """Return the part of `copy` that reads what `inner` writes, reading what `inner` reads instead.

    inner: must be `nested`. The result is empty where they have nothing in common. Raises TooScattered.
    """
    grid = _Grid(inner)
    found: list[Copy] = []
    pending = [Copy(copy.into, copy.source, tuple(a for a in copy.axes if a.size != 1))]
    while pending:
        if len(found) + len(pending) > MANY:
            raise TooScattered
        one = pending.pop()
        parts = _parts(one, grid) if one.size else []
        if parts is not None:
            pending += reversed(parts)
        else:
            found.append(_carried_over(one, grid))
    return found


def _parts(copy: Copy, grid: _Grid) -> list[Copy] | None:
    """Return smaller copies that together are the part of `copy` on the grid, or None where it lies on it whole."""
    digits = grid.digits(copy.source)
    loops: list[list[tuple[int, int]]] = [[] for _ in grid.axes]
    for which, axis in enumerate(copy.axes):
        if axis.source:
            k = grid.digit_of(axis.source)
            loops[k].append((axis.source // grid.axes[k].into, which))
    for k, digit in enumerate(digits):
        loops[k].sort(reverse=True)
        split = _split_carry(copy, digit, loops[k], grid.radix(k)) if k else None
        if split is not None:
            return split
    for k, digit in enumerate(digits):
        split = _clip(copy, digit, loops[k], grid.axes[k].size)
        if split is not None:
            return split
    return None


def _split_carry(copy: Copy, digit: int, loops: list[tuple[int, int]], radix: int) -> list[Copy] | None:
    """Split a loop where the digit that it counts up would carry; None where it does not."""
    span = sum(step * (copy.axes[which].size - 1) for step, which in loops)
    if digit + span < radix:
        return None
    step, which = loops[0]
    size, into, source = copy.axes[which]
    span -= step * (size - 1)
    turn = radix // step
    if turn and radix % step == 0 and size % turn == 0 and size > turn and digit + span < step:
        outer, inner = Axis(size // turn, into * turn, source * turn), Axis(turn, into, source)
        return [Copy(copy.into, copy.source, (*copy.axes[:which], outer, inner, *copy.axes[which + 1 :]))]
    good = max(0, -((digit + span - radix) // step))
    return _before_and_after(copy, which, _cut_at(good, size, turn))


def _cut_at(good: int, size: int, turn: int) -> int:
    """Return where to cut a loop of which `good` rounds fit: there, or before a last incomplete turn."""
    if turn and good == turn and size > turn and size % turn:
        return size - size % turn
    return good or 1


def _before_and_after(copy: Copy, which: int, at: int) -> list[Copy]:
    size = copy.axes[which].size
    return [copy.cut(which, a, b) for a, b in ((0, at), (at, size)) if a < b]


def _clip(copy: Copy, digit: int, loops: list[tuple[int, int]], bound: int) -> list[Copy] | None:
    """Keep what stays below `bound` of a digit and not below 0; None where all of it does."""
    span = sum(step * (copy.axes[which].size - 1) for step, which in loops)
    if digit >= 0 and digit + span < bound:
        return None
    if not loops or digit >= bound or digit + span < 0:
        return []
    step, which = loops[0]
    size = copy.axes[which].size
    inner = span - step * (size - 1)
    first = min(max(0, -((digit + inner) // step)), size)  # the first round that is not wholly below 0
    stop = max(min(size, -((digit - bound) // step)), 0)  # the first round that is wholly past the bound
    if first >= stop:
        return []
    if (first, stop) != (0, size):
        return [copy.cut(which, first, stop)]
    return _before_and_after(copy, which, 1 if digit < 0 else size - 1)


def _carried_over(copy: Copy, grid: _Grid) -> Copy:
    source = grid.source + sum(d * a.source for d, a in zip(grid.digits(copy.source), grid.axes, strict=True))
    axes = []
    for size, into, step in copy.axes:
        unit = grid.axes[grid.digit_of(step)]
        axes.append(Axis(size, into, step // unit.into * unit.source if step else 0))
    return Copy(copy.into, source, tuple(axes))


def in_order(copy: Copy, limit: int) -> list[Copy] | None:
    """Return copies that together are `copy` and of which each reads in the order in which it writes.

    None where more than `limit` would be needed, as for a transpose.
    """
    copy = copy.tidy()
    if not copy.axes or (len(copy.axes) == 1 and copy.axes[0].source > 0):
        return [copy]
    kept = _heaviest_falling(copy.axes)
    apart = [k for k in range(len(copy.axes)) if k not in kept]
    if prod(copy.axes[k].size for k in apart) > limit:
        return None
    copies = [copy]
    for k in reversed(apart):
        copies = [c.cut(k, i, i + 1) for c in copies for i in range(copy.axes[k].size)]
    return [c.tidy() for c in copies]


def _heaviest_falling(axes: Sequence[Axis]) -> tuple[int, ...]:
    """Return the numbers of loops that copy most among those whose reading strides fall from loop to loop."""
    best: list[tuple[int, tuple[int, ...]]] = []
    for k, axis in enumerate(axes):
        before = [b for b in best if axes[b[1][-1]].source > axis.source]
        weight, chain = max(before, default=(1, ()))
        best.append((weight * axis.size, (*chain, k)) if axis.source > 0 else (0, (k,)))
    weight, chain = max(best, default=(1, ()))
    return chain if weight else ()


def rounds(copy: Copy) -> Iterator[Copy]:
    """Yield the copy of each round of the outermost loop."""
    if not copy.axes:
        yield copy
        return
    for i in range(copy.axes[0].size):
        yield copy.cut(0, i, i + 1)
