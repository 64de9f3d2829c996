"""Long reads that are copied on are done a strip at a time: what has come is still in the processor's cache when it is
copied, cast, or some columns are taken out of it. Arithmetic on schedules; nothing is read here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from typing import NamedTuple

from tensorferry.core.boxes import Box
from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch, Piece, Read, Task

__all__ = ["Strip", "read_in_strips", "strips"]

_STRIP = 2 << 20
"""Bytes of a strip at least, and less than twice as many at most, where rows are shorter than that; else a row. Shorter
ones are copied more slowly, and longer ones do not stay in the cache."""


class Strip(NamedTuple):
    """Some rows of a read: `length` bytes from `start` of it, and the piece that they are."""

    start: int
    length: int
    piece: Piece


def read_in_strips(plan: Plan, batch: Batch, direct: Container[int]) -> dict[int, int]:
    """Return the reads that can be done in strips and are long enough, with the number of the one task of each.

    direct: the reads that need not be copied on. Left out is what is computed of whole inputs, and reads that bring
    anything else beside.
    """
    users = Counter(piece.read for task in batch.tasks for part in task.inputs for piece in part.pieces)
    found: dict[int, int] = {}
    for number, task in enumerate(batch.tasks):
        if len(task.inputs) != 1 or len(task.inputs[0].pieces) != 1 or plan.steps[task.step].via is not None:
            continue
        (piece,) = task.inputs[0].pieces
        read, unit = batch.reads[piece.read], _unit(plan, task)
        alone = users[piece.read] == 1 and piece.read not in direct
        if alone and 2 * _STRIP <= read.length == _extent(piece) * unit and read.times == 1 and _falling(piece):
            found[piece.read] = number
    return found


def strips(plan: Plan, read: Read, task: Task) -> Iterator[Strip]:
    """Cut a read that is done in strips; together they bring the same bytes, each of them once."""
    ((piece,),) = (part.pieces for part in task.inputs)
    dim = next(d for d, n in enumerate(piece.box.shape) if n > 1)
    row = piece.strides[dim] * _unit(plan, task)
    rows, first, last = piece.box.shape[dim], piece.box.start[dim], piece.box.stop[dim]
    each = -(-rows // (read.length // _STRIP))
    for at in range(first, last, each):
        stop, begin = min(at + each, last), (at - first) * row
        length = read.length - begin if stop == last else (stop - at) * row
        yield Strip(begin, length, piece._replace(box=_narrowed(piece.box, dim, at, stop)))


def _unit(plan: Plan, task: Task) -> int:
    """Return the bytes of a block of what `task` takes."""
    return plan.steps[task.step].sources[task.inputs[0].source].entry.dtype.block_bytes


def _extent(piece: Piece) -> int:
    """Return how many blocks there are from the first to the last of a piece; 0 where it does not begin its read."""
    if piece.offset:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(piece.box.shape, piece.strides, strict=True))


def _falling(piece: Piece) -> bool:
    """Whether the rows of a piece lie one after the other: a transposed one has them side by side."""
    steps = [(n, s) for n, s in zip(piece.box.shape, piece.strides, strict=True) if n > 1]
    inner = [1 + sum((n - 1) * s for n, s in steps[i + 1 :]) for i in range(len(steps))]
    return bool(steps) and all(s >= rest for (_, s), rest in zip(steps, inner, strict=True))


def _narrowed(box: Box, dim: int, start: int, stop: int) -> Box:
    return Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :]))
