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
