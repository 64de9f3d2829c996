"""Positions that loops go through, as a box or a region of a tensor, if they are one. Pure integer geometry."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tensorferry.core.boxes import Box, Region, Shape, strides_of
from tensorferry.modules.views import Axis, Copy, TooScattered, through

__all__ = ["as_box", "as_region"]


def as_box(start: int, loops: Sequence[tuple[int, int]], shape: Shape) -> tuple[Box, tuple[int, ...]] | None:
    """Return positions of a row-major tensor of `shape` as a box, if they are one, and the dimension of each loop.

    loops: (size, stride), in any order. The second result names the dimensions of loops longer than 1, after
    loops that run over several dimensions were split, in the order of `loops`.
    """
    strides = strides_of(shape)
    dims = [k for k, n in enumerate(shape) if n > 1]
    frame = Copy(0, 0, tuple(Axis(shape[k], strides[k], strides[k]) for k in dims))
    try:
        found = through(Copy(0, start, tuple(Axis(n, 0, s) for n, s in loops if n != 1)), frame)
    except TooScattered:
        return None
    by_stride = {strides[k]: k for k in dims}
    if len(found) != 1 or prod(n for n, _ in loops) != found[0].size:
        return None
    order = tuple(by_stride.get(a.source, -1) for a in found[0].axes)
    if -1 in order or len(set(order)) < len(order):
        return None
    first = [start // s % n if n > 1 else 0 for s, n in zip(strides, shape, strict=True)]
    stop = [a + 1 for a in first]
    for k, axis in zip(order, found[0].axes, strict=True):
        stop[k] = first[k] + axis.size
    return Box(tuple(first), tuple(stop)), order


def as_region(start: int, loops: Sequence[tuple[int, int]], shape: Shape) -> Region | None:
    """Return positions of a row-major tensor of `shape` as a region whose order is that of the loops.

    loops: (size, stride), strides falling. A box of the shape itself is preferred, else the view is made of the
    strides. None where they are no region.

    >>> as_region(2, [(2, 6)], (4, 3))
    Region(view=(2, 6), box=Box(start=(0, 2), stop=(2, 3)))
    """
    if not loops or (len(loops) == 1 and loops[0][1] == 1):
        found = _run_as_box(start, loops[0][0] if loops else 1, shape)
        if found is not None:
            return Region(shape, found)
    boxed = as_box(start, loops, shape)
    if boxed is not None and list(boxed[1]) == sorted(boxed[1]):
        return Region(shape, boxed[0])
    units = [s for _, s in loops]
    units += [1] if not units or units[-1] != 1 else []
    outer = [prod(shape), *units]
    if any(b <= 0 or a % b for a, b in zip(outer, units, strict=False)):
        return None
    view = tuple(a // b for a, b in zip(outer, units, strict=False))
    sizes = [n for n, _ in loops] + [1] * (len(units) - len(loops))
    first = tuple(start // u % n for u, n in zip(units, view, strict=True))
    stop = tuple(a + n for a, n in zip(first, sizes, strict=True))
    return Region(view, Box(first, stop)) if all(b <= n for b, n in zip(stop, view, strict=True)) else None


def _run_as_box(start: int, size: int, shape: Shape) -> Box | None:
    """Return `size` positions that follow each other as a box of whole rows, if they are one: the usual case."""
    first: list[int] = []
    rest = start
    for k, unit in enumerate(strides_of(shape)):
        digit, rest = divmod(rest, unit)
        first.append(digit)
        if size >= unit:
            count, odd = divmod(size, unit)
            if odd or rest or digit + count > shape[k]:
                return None
            inner = shape[k + 1 :]
            return Box((*first, *(0 for _ in inner)), (*(d + 1 for d in first[:-1]), digit + count, *inner))
    return Box((), ()) if not shape else None
