"""The schedule: which bytes to read in which batch, and where each piece goes. Values only; `lower` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from tensorferry.core.boxes import Box, Shape
from tensorferry.core.plan import Plan

__all__ = ["Batch", "Input", "Piece", "Read", "Schedule", "Task"]


class Read(NamedTuple):
    """Bytes of `file` that come in one go: a range from `offset`, or `times` runs of equal length, one every `stride`.

    length: bytes that come; those of runs lie one after the other then, without what is between them in the file.
    """

    file: str
    offset: int
    length: int
    times: int = 1
    stride: int = 0

    @property
    def run(self) -> int:
        """Bytes of one run."""
        return self.length // self.times

    @property
    def runs(self) -> Iterator[tuple[int, int]]:
        """Offset and length of each contiguous range of the file, in order.

        >>> list(Read("f", 100, 6, 3, 10).runs)
        [(100, 2), (110, 2), (120, 2)]
        """
        run = self.run
        return ((self.offset + i * self.stride, run) for i in range(self.times))


class Piece(NamedTuple):
    """Blocks of an input that one read brings. A block is one element, but for packed types.

    read: which read of the batch. offset: bytes from the first that it brings to the first block.
    strides: in blocks, of the bytes as they were read. box: which part of the source's view they are, in blocks.
    """

    read: int
    offset: int
    strides: Shape
    box: Box


class Input(NamedTuple):
    """Part of one source of a step: `box` of the view of the source's region, in blocks, made of `pieces`."""

    source: int
    box: Box
    pieces: tuple[Piece, ...]


class Task(NamedTuple):
    """What is done when the reads of its batch have arrived.

    step: number of the plan's step. out: the part of the step's output that this task makes; None for all of it.
    For a copy it is relative to the source's region, in blocks; for a transform, to the window, in elements. It
    lands at the same row-major positions of `into`, which may have another shape. Without inputs nothing is read:
    `into` is filled, or empty.
    """

    step: int
    out: Box | None
    inputs: tuple[Input, ...]


class Batch(NamedTuple):
    """Reads that are staged together, and the tasks that they complete.

    staging: bytes of memory that it takes where all of it is staged: those of the reads, and the most that computing
    one of the tasks takes beside them.
    """

    reads: tuple[Read, ...]
    tasks: tuple[Task, ...]
    staging: int

    @property
    def length(self) -> int:
        """Bytes that its reads bring."""
        return sum(read.length for read in self.reads)

    @property
    def room(self) -> int:
        """Bytes that its tasks take beside what is staged; they are done one after the other."""
        return self.staging - self.length


@dataclass(frozen=True)
class Schedule:
    """All batches in the order in which they should be started. `max_staging` bounds what is staged at once."""

    plan: Plan
    batches: tuple[Batch, ...]
    max_staging: int

    def begun_at(self, part: int, of: int) -> Schedule:
        """Return the same batches in the same order, begun at `part` of so many; what comes before comes last."""
        first = len(self.batches) * part // of
        return replace(self, batches=self.batches[first:] + self.batches[:first]) if first else self

    @cached_property
    def bytes_read(self) -> int:
        """Bytes that will be requested, gaps included."""
        return sum(b.length for b in self.batches)

    @cached_property
    def reads(self) -> int:
        """How many requests there are: contiguous ranges of files."""
        return sum(r.times for b in self.batches for r in b.reads)

    @cached_property
    def largest_batch(self) -> int:
        """Bytes of the largest batch; above `max_staging` only where a single task cannot be cut."""
        return max((b.staging for b in self.batches), default=0)
