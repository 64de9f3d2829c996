"""What two regions of one tensor have in common, whatever their views. Pure arithmetic on elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tensorferry.core.boxes import Region
from tensorferry.core.coverage import flat_runs

__all__ = ["SharedRun", "shared_runs", "shared_size"]


class SharedRun(NamedTuple):
    """`length` elements that follow each other in both regions, from position `at` of the one and `other` of the other.

    Positions count the elements of a region in its own order.
    """

    at: int
    other: int
    length: int


def shared_runs(one: Region, other: Region) -> Iterator[SharedRun]:
    """Yield what both regions hold of one tensor, in its order.

    >>> from tensorferry.core.boxes import Box
    >>> rows, flat = Region((4, 2), Box((1, 0), (3, 2))), Region((8,), Box((3,), (8,)))
    >>> list(shared_runs(rows, flat))
    [SharedRun(at=1, other=0, length=3)]
    """
    ours, theirs = _placed(one), _placed(other)
    a, b = next(ours, None), next(theirs, None)
    while a is not None and b is not None:
        start, stop = max(a[0], b[0]), min(a[1], b[1])
        if start < stop:
            yield SharedRun(a[2] + start - a[0], b[2] + start - b[0], stop - start)
        if a[1] <= b[1]:
            a = next(ours, None)
        else:
            b = next(theirs, None)


def shared_size(one: Region, other: Region) -> int:
    """Return how many elements of one tensor both regions hold."""
    if one.is_whole or other.is_whole:
        return other.size if one.is_whole else one.size
    if one.view == other.view:
        common = one.box.meet(other.box)
        return common.size if common is not None else 0
    return sum(run.length for run in shared_runs(one, other))


def _placed(region: Region) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a region with the position in it at which each begins."""
    position = 0
    for start, stop in flat_runs(region):
        yield start, stop, position
        position += stop - start
