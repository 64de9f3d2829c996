"""Cutting a region of a stored tensor into pieces that are worth one read each. Pure arithmetic on elements.

Lengths here are in *blocks* of the element type, so that a piece always starts and ends on a byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from operator import add, mul
from typing import NamedTuple

from tensorferry.core.boxes import Box, Region, Shape, strides_of
from tensorferry.core.cost import ReadCost
from tensorferry.core.dtypes import DType

__all__ = ["Cut", "cut", "in_blocks"]

_MOST_RUNS = 1 << 13
"""Runs of one read, so that whoever reads them one after the other can stop soon."""


class Cut(NamedTuple):
    """A piece: `box` in the coordinates of the region's view, in bytes relative to the tensor.

    length: bytes read, in one range from `offset` on, or in `times` runs of equal length, one every `stride` bytes.
    strides: of the bytes as they were read, without what lies between runs, in blocks.
    """

    box: Box
    offset: int
    length: int
    needed: int
    strides: Shape
    times: int = 1
    stride: int = 0


def in_blocks(region: Region, dtype: DType) -> Region | None:
    """Return `region` counted in blocks of `dtype`, or None where it would cut through a block.

    All of a tensor whose rows are no whole blocks (F4 of shape (2, 3)) comes back as one flat row.
    """
    n = dtype.block
    if n == 1:
        return region
    if not region.view or any(x % n for x in (region.view[-1], region.box.start[-1], region.box.stop[-1])):
        count, rest = divmod(prod(region.view), n)
        return Region.whole((count,)) if region.is_whole and not rest else None

    def fewer(shape: Shape) -> Shape:
        return (*shape[:-1], shape[-1] // n)

    return Region(fewer(region.view), Box(fewer(region.box.start), fewer(region.box.stop)))


def cut(region: Region, unit: int, cost: ReadCost, strides: Shape | None = None) -> Iterator[Cut]:
    """Yield pieces that make up `region`, each an outer range of it, in the order of their bytes.

    unit: bytes of one block. strides: of the view, in blocks, where it is not row-major.
    """
    if strides is None:
        yield from _cut(region.box, strides_of(region.view), unit, cost)
        return
    # A transposed tensor is cut in the order in which it lies, or every element would be a piece.
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    back = sorted(range(len(order)), key=order.__getitem__)
    for piece in _cut(_permuted(region.box, order), tuple(strides[d] for d in order), unit, cost):
        yield piece._replace(box=_permuted(piece.box, back), strides=tuple(piece.strides[d] for d in back))


def _permuted(box: Box, order: Sequence[int]) -> Box:
    return Box(tuple(box.start[d] for d in order), tuple(box.stop[d] for d in order))


def _cut(whole: Box, steps: Shape, unit: int, cost: ReadCost) -> Iterator[Cut]:
    extents = whole.shape
    if not all(extents):
        return
    dims, rows, apart = _joined(extents, steps, unit, cost)
    cover = 1 + sum((n - 1) * s for n, s in zip(extents[dims:], steps[dims:], strict=True))
    needed = prod(extents[dims:])
    first = sum(x * s for x, s in zip(whole.start, steps, strict=True))
    if not dims:
        yield Cut(whole, first * unit, cover * unit, needed * unit, steps)
        return
    last, step = extents[dims - 1], steps[dims - 1]
    closed = (*steps[: dims - 1], cover, *steps[dims:]) if apart else steps
    for index in product(*map(range, extents[: dims - 1])):
        base = first + sum(map(mul, index, steps))
        for a in range(0, last, rows):
            n = min(rows, last - a)
            length = n * cover if apart else cover + (n - 1) * step
            runs = (n, step * unit) if apart and n > 1 else (1, 0)
            box = _box(whole, index, a, a + n)
            yield Cut(box, (base + a * step) * unit, length * unit, needed * n * unit, closed, *runs)


def _joined(extents: Shape, steps: Shape, unit: int, cost: ReadCost) -> tuple[int, int, bool]:
    """Return the outermost dimension from which one piece takes everything, how much of the one before it, and
    whether what lies between that is left out.
    """
    cover, needed, dim = 1, 1, len(extents)
    while dim > 0:
        n, step = extents[dim - 1], steps[dim - 1]
        longer = cover + (n - 1) * step
        if n > 1 and not cost.joins((step - cover) * unit, longer * unit, needed * n * unit):
            return dim, max(1, min(cost.max_read // (cover * unit), _MOST_RUNS)), True
        if n > 1 and longer * unit > cost.max_read:
            return dim, max(1, 1 + (cost.max_read // unit - cover) // step) if step else n, False
        cover, needed, dim = longer, needed * n, dim - 1
    return 0, 1, False


def _box(whole: Box, index: Shape, a: int, b: int) -> Box:
    """Return the part of a box that has one `index` in its first dimensions and ``a:b`` in the next one."""
    k = len(index)
    lead = tuple(map(add, whole.start, index))
    begin = whole.start[k]
    return Box((*lead, begin + a, *whole.start[k + 1 :]), (*(x + 1 for x in lead), begin + b, *whole.stop[k + 1 :]))
