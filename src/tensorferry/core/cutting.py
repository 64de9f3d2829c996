"""Cutting a region of a stored tensor into pieces that are worth one read each. Pure arithmetic on elements.

Lengths here are in *blocks* of the element type, so that a piece always starts and ends on a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from tensorferry.core.boxes import Box, Region, Shape, strides_of
from tensorferry.core.dtypes import DType

__all__ = ["Cut", "ReadCost", "cut", "in_blocks"]


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What makes two runs of bytes one read.

    max_gap: largest hole, in bytes, that is read over. max_read: largest read, in bytes, where the data can be cut
    at all. waste: most bytes read for each byte needed.
    """

    max_gap: int
    max_read: int
    waste: float

    def joins(self, gap: int, length: int, needed: int) -> bool:
        """Whether a hole of `gap` bytes is read over in a read of `length` bytes of which `needed` are used."""
        return gap <= 0 or (gap <= self.max_gap and length <= self.waste * needed)


class Cut(NamedTuple):
    """A piece: `box` in the coordinates of the region's view, in one range of bytes relative to the tensor."""

    box: Box
    offset: int
    length: int
    needed: int


def in_blocks(region: Region, dtype: DType) -> Region | None:
    """Return `region` counted in blocks of `dtype`, or None where it would cut through a block."""
    n = dtype.block
    if n == 1:
        return region
    if not region.view or any(x % n for x in (region.view[-1], region.box.start[-1], region.box.stop[-1])):
        return None

    def fewer(shape: Shape) -> Shape:
        return (*shape[:-1], shape[-1] // n)

    return Region(fewer(region.view), Box(fewer(region.box.start), fewer(region.box.stop)))


def cut(region: Region, unit: int, cost: ReadCost, strides: Shape | None = None) -> Iterator[Cut]:
    """Yield pieces that make up `region`, each an outer range of it, row-major in order.

    unit: bytes of one block. strides: of the view, in blocks, where it is not row-major.
    """
    extents, start = region.shape, region.box.start
    steps = strides_of(region.view) if strides is None else strides
    if prod(extents) == 0:
        return
    whole, rows = _joined(extents, steps, unit, cost)
    cover = 1 + sum((n - 1) * s for n, s in zip(extents[whole:], steps[whole:], strict=True))
    needed = prod(extents[whole:])
    outer = [range(n) for n in extents[: max(whole - 1, 0)]]
    last = extents[whole - 1] if whole else 1
    for index in product(*outer):
        for a in range(0, last, rows):
            b = min(a + rows, last)
            box = _box(region, index, (a, b) if whole else None)
            at = sum(x * s for x, s in zip((*index, *((a,) if whole else ())), steps, strict=False))
            length = cover + ((b - a - 1) * steps[whole - 1] if whole else 0)
            first = at + sum(x * s for x, s in zip(start, steps, strict=True))
            yield Cut(box, first * unit, length * unit, needed * (b - a) * unit)


def _joined(extents: Shape, steps: Shape, unit: int, cost: ReadCost) -> tuple[int, int]:
    """Return the outermost dimension from which one piece takes everything, and how much of the one before it."""
    cover, needed, dim = 1, 1, len(extents)
    while dim > 0:
        n, step = extents[dim - 1], steps[dim - 1]
        longer = cover + (n - 1) * step
        if n > 1 and not cost.joins((step - cover) * unit, longer * unit, needed * n * unit):
            return dim, 1
        if n > 1 and longer * unit > cost.max_read:
            return dim, max(1, 1 + (cost.max_read // unit - cover) // step) if step else n
        cover, needed, dim = longer, needed * n, dim - 1
    return 0, 1


def _box(region: Region, index: Shape, rows: tuple[int, int] | None) -> Box:
    begin, end = region.box.start, region.box.stop
    k = len(index)
    lead = tuple(begin[d] + i for d, i in enumerate(index))
    if rows is None:
        return region.box
    return Box(
        (*lead, begin[k] + rows[0], *begin[k + 1 :]),
        (*(x + 1 for x in lead), begin[k] + rows[1], *end[k + 1 :]),
    )
