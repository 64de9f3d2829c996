"""Long reads that are copied on are done a strip at a time: what has come is still in the processor's cache when it is
copied, cast, or some columns are taken out of it. Arithmetic on schedules; nothing is read here."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import pairwise
from typing import NamedTuple

from tensorferry.core.boxes import Box
from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch, Piece, Read, Task

__all__ = ["LONG", "Part", "Strip", "bytes_of_a_strip", "extent", "parts_of", "row_of", "strips"]

_STRIP = (4 << 20) - (64 << 10)
"""Bytes of a strip at most, where rows are not longer than that; else it is a row. Two huge pages hold it, wherever
in a page it begins: each more of them costs a thread milliseconds, once. Of shorter ones, Python takes as long as
copying."""
_STRIP_FAR = 4 << 20
"""Likewise where each strip is a request to a store of objects: a half of the longest one."""
LONG = 4 << 20
"""Bytes from which on a read that nobody else makes is worth cutting."""
_PART = 256 << 10
"""Bytes that the parts of a read have at least, on average: each of them is read by itself then."""


class Part(NamedTuple):
    """What one task takes of a read: `length` bytes from `start` of it. task: its number in the batch."""

    task: int
    start: int
    length: int


class Strip(NamedTuple):
    """Some rows of a read, along `dim`: `length` bytes from `start` of it, and the piece that they are."""

    start: int
    length: int
    piece: Piece
    dim: int

    def where(self, offset: int, squeezed: tuple[int, int] = (1, 1)) -> Piece:
        """Return the piece in memory where it begins at `offset`.

        squeezed: how many bytes there are from row to row, and how many there were.
        """
        now, before = squeezed
        strides = list(self.piece.strides)
        strides[self.dim] = strides[self.dim] * now // before
        return self.piece._replace(offset=offset, strides=tuple(strides))


def parts_of(
    plan: Plan, batch: Batch, direct: Container[int] = (), *, least: int = LONG
) -> dict[int, tuple[Part, ...]]:
    """Return the reads that can be done in strips and have `least` bytes, with what their tasks take of each, in order.

    direct: the reads that need not be copied on. Left out is what is computed of whole inputs, and what tasks take that
    do not have all of it from one read.
    """
    found: dict[int, list[Part]] = {n: [] for n, r in enumerate(batch.reads) if n not in direct and r.length >= least}
    if not found:
        return {}
    for number, task in enumerate(batch.tasks):
        pieces = [piece for part in task.inputs for piece in part.pieces if piece.read in found]
        for piece in pieces:
            simple = len(task.inputs) == len(task.inputs[0].pieces) == 1 and plan.steps[task.step].via is None
            if simple and _falling(piece):
                found[piece.read].append(Part(number, piece.offset, extent(piece) * _unit(plan, task)))
            else:
                found.pop(piece.read, None)
    return {n: parts for n, of in found.items() if (parts := _in_a_row(of, batch.reads[n]))}


def strips(plan: Plan, task: Task, part: Part, *, far: bool = False) -> Iterator[Strip]:
    """Cut what a task takes of a read that is done in strips; together they bring the same bytes, each of them once.

    far: whether each of them is a request to a store of objects.
    """
    ((piece,),) = (given.pieces for given in task.inputs)
    dim, row = _falling_dim(piece), row_of(plan, task)
    first, last, each = piece.box.start[dim], piece.box.stop[dim], _rows_of_a_strip(piece.box.shape[dim], row, far)
    for at in range(first, last, each):
        stop, begin = min(at + each, last), (at - first) * row
        length = part.length - begin if stop == last else (stop - at) * row
        yield Strip(part.start + begin, length, piece._replace(offset=0, box=_narrowed(piece.box, dim, at, stop)), dim)


def bytes_of_a_strip(plan: Plan, task: Task, *, far: bool = False) -> int:
    """Return from where to where it is from one of the `strips` of a task to the next, in bytes; whole rows."""
    ((piece,),) = (given.pieces for given in task.inputs)
    row = row_of(plan, task)
    return _rows_of_a_strip(piece.box.shape[_falling_dim(piece)], row, far) * row


def _rows_of_a_strip(rows: int, row: int, far: bool) -> int:
    """Return how many of `rows`, of `row` bytes each, are a strip: whichever columns of them are needed."""
    most = _STRIP_FAR if far else _STRIP
    return -(-rows // -(-rows // max(most // row, 1)))


def row_of(plan: Plan, task: Task) -> int:
    """Return the bytes from one row to the next of what a task takes of a read that is done in strips."""
    ((piece,),) = (part.pieces for part in task.inputs)
    return piece.strides[_falling_dim(piece)] * _unit(plan, task)


def _in_a_row(parts: list[Part], read: Read) -> tuple[Part, ...]:
    """Return `parts` in the order in which they lie; empty where they overlap, or are too small to be read alone."""
    parts = sorted(parts, key=lambda part: part.start)
    apart = all(one.start + one.length <= two.start for one, two in pairwise(parts))
    return tuple(parts) if apart and read.times == 1 and read.length >= _PART * len(parts) else ()


def _falling_dim(piece: Piece) -> int:
    """Return the outermost dimension along which a piece has several rows; the first where there is but one element."""
    return next((d for d, n in enumerate(piece.box.shape) if n > 1), 0)


def _unit(plan: Plan, task: Task) -> int:
    """Return the bytes of a block of what `task` takes."""
    return plan.steps[task.step].sources[task.inputs[0].source].entry.dtype.block_bytes


def extent(piece: Piece) -> int:
    """Return how many blocks there are from the first to the last of a piece."""
    return 1 + sum((n - 1) * s for n, s in zip(piece.box.shape, piece.strides, strict=True))


def _falling(piece: Piece) -> bool:
    """Whether the rows of a piece lie one after the other: a transposed one has them side by side."""
    steps = [(n, s) for n, s in zip(piece.box.shape, piece.strides, strict=True) if n > 1]
    inner = [1 + sum((n - 1) * s for n, s in steps[i + 1 :]) for i in range(len(steps))]
    return bool(steps) and all(s >= rest for (_, s), rest in zip(steps, inner, strict=True))


def _narrowed(box: Box, dim: int, start: int, stop: int) -> Box:
    return Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :]))
