"""Boxes and regions: which part of a tensor, without saying what is in it.

Pure integer geometry. A box is a half-open hyper-rectangle of a tensor; a region is a box of the
tensor *reshaped*, which is enough to say "head 3 of an interleaved qkv", "the odd rows" or "expert
17 of a stacked tensor" without strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, lt, sub

__all__ = ["Box", "Region", "Shape", "strides_of"]

Shape = tuple[int, ...]


def strides_of(shape: Sequence[int]) -> Shape:
    """Return the row-major strides of `shape`, in elements.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Box:
    """The elements `start <= index < stop` of a tensor with ``len(start)`` dimensions."""

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        """Length along each dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index a tensor with to get this box."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def meet(self, other: Box) -> Box | None:
        """Return the common part, or None where it would be empty.

        >>> Box((0, 0), (2, 4)).meet(Box((1, 3), (5, 5)))
        Box(start=(1, 3), stop=(2, 4))
        """
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def shift(self, by: Sequence[int]) -> Box:
        """Return this box moved by `by` elements along each dimension."""
        return Box(tuple(map(add, self.start, by)), tuple(map(add, self.stop, by)))

    def relative_to(self, origin: Box) -> Box:
        """Return this box in the coordinates of `origin`, which holds it."""
        return Box(tuple(map(sub, self.start, origin.start)), tuple(map(sub, self.stop, origin.start)))

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether this is a box of a tensor of `shape`: same rank, ordered, nothing outside."""
        return len(self.start) == len(self.stop) == len(shape) and all(
            0 <= a <= b <= n for a, b, n in zip(self.start, self.stop, shape, strict=True)
        )

    def rows(self, most: int) -> Iterator[Box]:
        """Cut along the outermost dimension that has an extent into boxes of at most `most` of it."""
        dim = next((d for d, n in enumerate(self.shape) if n > 1), None)
        if dim is None:
            yield self
            return
        for a in range(self.start[dim], self.stop[dim], most):
            b = min(a + most, self.stop[dim])
            yield Box((*self.start[:dim], a, *self.start[dim + 1 :]), (*self.stop[:dim], b, *self.stop[dim + 1 :]))


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor: reshape it row-major to `view`, then take `box`.

    The elements of a region have an order, row-major within the box; two regions of equal `size` can be
    copied onto each other whatever their shapes.
    """

    view: Shape
    box: Box

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return all of a tensor of `shape`."""
        return cls(tuple(shape), Box.whole(shape))

    @property
    def shape(self) -> Shape:
        """Shape of the box."""
        return self.box.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.box.size

    @property
    def is_whole(self) -> bool:
        """Whether the box takes all of the view."""
        return self.box.stop == self.view and not any(self.box.start)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether this is a region of a tensor of `shape`."""
        return prod(self.view) == prod(shape) and self.box.inside(self.view)

    def part(self, box: Box) -> Region:
        """Return the region that is `box` *of this region*, in its own coordinates."""
        return Region(self.view, box.shift(self.box.start))

    def seen_as(self, view: Shape) -> Region | None:
        """Return the same elements, in the same order, as a box of another `view`; None where they are no box of it.

        >>> Region((6, 2), Box((2, 0), (4, 2))).seen_as((3, 2, 2))
        Region(view=(3, 2, 2), box=Box(start=(1, 0, 0), stop=(2, 2, 2)))
        """
        if view == self.view:
            return self
        if prod(view) != prod(self.view) or not self.size:
            return None
        start: list[int] = []
        stop: list[int] = []
        at = 0
        for old, new in _equal_groups(self.view, view):
            dims = slice(at, at + len(old))
            at += len(old)
            part = _same_box(old, self.box.start[dims], self.box.stop[dims], new)
            if part is None:
                return None
            start += part[0]
            stop += part[1]
        return Region(view, Box(tuple(start), tuple(stop)))


def _equal_groups(one: Shape, other: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Cut two views of as many elements, none of them empty, into the shortest runs of dimensions of equal products."""
    i = j = 0
    while i < len(one) or j < len(other):
        first, second = i, j
        left = right = 1
        while first == i or second == j or left != right:
            if left <= right and i < len(one):
                left *= one[i]
                i += 1
            elif j < len(other):
                right *= other[j]
                j += 1
            else:
                break
            if left == right and (i > first or j > second):
                break
        yield one[first:i], other[second:j]


def _same_box(old: Shape, start: Shape, stop: Shape, new: Shape) -> tuple[Shape, Shape] | None:
    """Return the box of `new`, as start and stop, that has the elements of a box of `old`; None if there is none."""
    if old == new:
        return start, stop
    run = _run(old, start, stop)
    return None if run is None else _box_of_run(new, *run)


def _run(shape: Shape, start: Shape, stop: Shape) -> tuple[int, int] | None:
    """Return the half-open interval of positions that a box is, or None where it is several."""
    first = sum(a * s for a, s in zip(start, strides_of(shape), strict=True))
    size = prod(map(sub, stop, start))
    last = sum((b - 1) * s for b, s in zip(stop, strides_of(shape), strict=True))
    return (first, first + size) if last - first + 1 == size else None


def _box_of_run(shape: Shape, first: int, last: int) -> tuple[Shape, Shape] | None:
    """Return the box that the positions ``first <= p < last`` are, or None where they are several."""
    low: list[int] = []
    high: list[int] = []
    for step in strides_of(shape):
        a, b = first // step, -(-last // step)
        if b - a > 1 and (first % step or last % step):
            return None
        low.append(a)
        high.append(b)
        if b - a > 1:  # whole from here on
            rest = shape[len(low) :]
            return (*low, *(0 for _ in rest)), (*high, *rest)
        first, last = first - a * step, last - a * step
    return tuple(low), tuple(high)
