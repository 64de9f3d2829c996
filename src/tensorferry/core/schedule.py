"""The schedule: which bytes to read in which batch, and where each piece goes. Values only; `lower` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tensorferry.core.boxes import Box, Shape
from tensorferry.core.plan import Plan

__all__ = ["Batch", "Input", "Piece", "Read", "Schedule", "Task"]


class Read(NamedTuple):
    """One request: `length` bytes of `file` from `offset`."""

    file: str
    offset: int
    length: int


class Piece(NamedTuple):
    """Blocks of an input that one read brings. A block is one element, but for packed types.

    read: which read of the batch. offset: bytes from the start of that read to the first block.
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
    """Reads that are staged together, and the tasks that they complete. `staging` is in bytes."""

    reads: tuple[Read, ...]
    tasks: tuple[Task, ...]
    staging: int


@dataclass(frozen=True)
class Schedule:
    """All batches in the order in which they should be started. `max_staging` bounds what is staged at once."""

    plan: Plan
    batches: tuple[Batch, ...]
    max_staging: int

    @cached_property
    def bytes_read(self) -> int:
        """Bytes that will be requested, gaps included."""
        return sum(r.length for b in self.batches for r in b.reads)

    @cached_property
    def reads(self) -> int:
        """How many requests there are."""
        return sum(len(b.reads) for b in self.batches)

    @cached_property
    def largest_batch(self) -> int:
        """Bytes of the largest batch; above `max_staging` only where a single task cannot be cut."""
        return max((b.staging for b in self.batches), default=0)
