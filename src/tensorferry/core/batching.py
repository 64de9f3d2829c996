"""From pieces of work, whose bytes are known, to batches of reads: the order, what is joined, the bounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tensorferry.core.boxes import Box, Shape
from tensorferry.core.cost import ReadCost
from tensorferry.core.schedule import Batch, Input, Piece, Read, Task

__all__ = ["Range", "Work", "batches", "task_of"]

_WORTH_APART = 64 << 10
"""Bytes that go straight to their place, if they are read for themselves: copying so many costs about a request."""

_Key = tuple[str, int, int, int, int, int]


class Range(NamedTuple):
    """Bytes that some input of some task needs, before neighbours are joined. Runs are as in `Read`.

    strides and box: as in `Piece`. source: which source of the step it is for.
    """

    file: str
    offset: int
    length: int
    needed: int
    times: int
    stride: int
    source: int
    strides: Shape
    box: Box

    @property
    def key(self) -> _Key:
        """What is read; several ranges may ask for the same."""
        return self[:6]


class Work(NamedTuple):
    """A task whose ranges are known but not yet put into reads.

    module: which its parameter belongs to. boxes: of its inputs. plain: whether its bytes are values as they are.
    room: bytes that it takes beside what is staged, while it is done.
    """

    module: str
    step: int
    out: Box | None
    boxes: tuple[Box, ...]
    ranges: tuple[Range, ...]
    plain: bool
    room: int


def batches(works: Iterable[Work], files: Mapping[str, int], cost: ReadCost, max_staging: int) -> Iterator[Batch]:
    """Yield the batches that do `works`, of which each has ranges.

    files: their order. Works that follow each other go together until a batch is as large as a read may be; it never
    stages more than `max_staging`, unless it is a single work.
    """
    group: list[Work] = []
    size = 0
    for work in _in_order(list(works), files):
        more = work.ranges[0].length if len(work.ranges) == 1 else sum(r.length for r in work.ranges)
        if group and size + more > cost.max_read:
            yield from _bounded(group, cost, max_staging)
            group, size = [], 0
        group.append(work)
        size += more
    if group:
        yield from _bounded(group, cost, max_staging)


def _in_order(works: list[Work], files: Mapping[str, int]) -> list[Work]:
    """Sort by file and offset, but keep modules together, so that each is whole, and done with, as soon as can be."""
    first: dict[str, tuple[int, int]] = {}
    where = [(files[w.ranges[0].file], w.ranges[0].offset) for w in works]
    for work, place in zip(works, where, strict=True):
        if place < first.setdefault(work.module, place):
            first[work.module] = place
    keys = [(first[work.module], place) for work, place in zip(works, where, strict=True)]
    return [works[i] for i in sorted(range(len(works)), key=keys.__getitem__)]


def _bounded(works: Sequence[Work], cost: ReadCost, max_staging: int) -> Iterator[Batch]:
    """Make one batch, or several where holes that are read over, or room, would take it past the bound."""
    batch = _batch(works, cost)
    if batch.staging <= max_staging or len(works) == 1:
        yield batch
        return
    half = len(works) // 2
    yield from _bounded(works[:half], cost, max_staging)
    yield from _bounded(works[half:], cost, max_staging)


def _batch(works: Sequence[Work], cost: ReadCost) -> Batch:
    room = max([w.room for w in works])
    read = one_read(works, cost)
    if read is not None:
        return Batch((read,), tuple([_task_of_one(w, 0, read.offset) for w in works]), read.length + room)
    plain: dict[_Key, bool] = {}
    for work in works:
        for r in work.ranges:
            key = r.key
            plain[key] = work.plain and key not in plain
    reading: list[_Reading] = []
    where: dict[_Key, int] = {}
    for key in sorted(plain):
        if not (reading and reading[-1].takes(key, plain[key], cost)):
            reading.append(_Reading(key, plain[key]))
        where[key] = len(reading) - 1
    reads = tuple(one.read for one in reading)
    return Batch(reads, tuple(task_of(w, reads, where) for w in works), sum(r.length for r in reads) + room)


def one_read(works: Sequence[Work], cost: ReadCost) -> Read | None:
    """Return the read that brings all of `works`, where each takes one range, in order, and no two differ in kind.

    That is so of most batches, and of all of those with very many works. None for others, of which `_Reading` may make
    one read as well.
    """
    file, start, *_ = works[0].ranges[0]
    plain, end, used = works[0].plain, start, 0
    for work in works:
        that, offset, length, needed, times, *_ = work.ranges[0]
        alone = len(work.ranges) == len(work.boxes) == 1  # an input may need no bytes, and is there all the same
        if offset < end or times > 1 or not alone or work.plain is not plain or that != file:
            return None
        gap, end, used = offset - end, offset + length, used + needed
        if gap and not cost.joins(gap, end - start, used):
            return None
    return Read(file, start, end - start) if len(works) == 1 or end - start <= cost.max_read else None


class _Reading:
    """A read that may still grow. plain: whether all of it can go straight to its place; used: bytes of it needed."""

    __slots__ = ("_file", "_length", "_offset", "_runs", "plain", "used")

    def __init__(self, key: _Key, plain: bool) -> None:
        self._file, self._offset, self._length, self.used, *self._runs = key
        self.plain = plain

    @property
    def read(self) -> Read:
        """What it has become."""
        return Read(self._file, self._offset, self._length, *self._runs)

    def takes(self, key: _Key, plain: bool, cost: ReadCost) -> bool:
        """Grow by a range that begins no earlier, if that costs less than reading it by itself, and say so."""
        file, offset, length, needed, times, _ = key
        start, had = self._offset, self._length
        if file != self._file or times > 1 or self._runs[0] > 1:
            return False
        gap, whole = offset - (start + had), max(start + had, offset + length) - start
        if whole > max(cost.max_read, had) or not cost.joins(gap, whole, self.used + needed):
            return False
        if gap >= 0 and plain != self.plain and (length if plain else had) >= _WORTH_APART:
            return False
        self._length, self._runs = whole, [1, 0]
        self.plain &= plain and gap >= 0
        self.used += needed
        return True


def task_of(work: Work, reads: Sequence[Read], where: Mapping[_Key, int]) -> Task:
    """Return the task that does `work` when `reads` have come; where: which of them brings a range."""
    if len(work.ranges) == len(work.boxes) == 1:
        n = where[work.ranges[0].key]
        return _task_of_one(work, n, reads[n].offset)
    pieces: list[list[Piece]] = [[] for _ in work.boxes]
    for r in work.ranges:
        n = where[r.key]
        pieces[r.source].append(Piece(n, r.offset - reads[n].offset, r.strides, r.box))
    inputs = tuple(Input(i, box, tuple(p)) for i, (box, p) in enumerate(zip(work.boxes, pieces, strict=True)))
    return Task(work.step, work.out, inputs)


def _task_of_one(work: Work, read: int, begin: int) -> Task:
    """Return the task of a work with one range, which the read of that number brings, from `begin` of a file on."""
    r = work.ranges[0]
    piece = Piece(read, r.offset - begin, r.strides, r.box)
    return Task(work.step, work.out, (Input(0, work.boxes[0], (piece,)),))
