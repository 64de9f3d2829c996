"""Which bytes several ranks read though each needs a part of them, and who reads which. Arithmetic; no I/O.

Of a matrix that is divided by columns each rank needs some of every row. What a rank would read whole is cut into units
of whole rows; of those that others read as well each reads its share, and hands it on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch, Read, Schedule, Task
from tensorferry.execute.strips import Part, parts_of, row_of, strips
from tensorferry.execute.ways import needs_little

__all__ = ["LEAST", "Offer", "Rows", "Shared", "Unit", "offered", "rows_of", "shared_rows"]

LEAST = 256 << 10
"""Bytes of a read from which on handing it on costs less than what it takes to agree on that."""


class Rows(NamedTuple):
    """Whole rows of a tensor: `length` bytes from `offset` of `file`, in units of `each` bytes, but for the last."""

    file: str
    offset: int
    length: int
    each: int

    @property
    def units(self) -> Iterator[tuple[int, int]]:
        """Offset and length of each unit.

        >>> list(Rows("f", 100, 50, 20).units)
        [(100, 20), (120, 20), (140, 10)]
        """
        end = self.offset + self.length
        return ((at, min(self.each, end - at)) for at in range(self.offset, end, self.each))


class Unit(NamedTuple):
    """A unit by the numbers that all ranks give it: of the rows, and within them."""

    rows: int
    part: int


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows that several ranks need parts of. number: the same on all of them; ranks: which they are, in order."""

    number: int
    ranks: tuple[int, ...]

    def reader(self, part: int) -> int:
        """Return the rank that reads a unit: they take turns."""
        return self.ranks[(self.number + part) % len(self.ranks)]

    def in_order(self, parts: int, rank: int) -> Iterator[int]:
        """Yield the numbers of all units as `rank` is to take them: of each round its own first, then those of others.

        When all ranks do so, and take rows in the same order, none waits for one that waits for it.
        """
        size = len(self.ranks)
        for first in range(0, parts, size):
            a_round = range(first, min(first + size, parts))
            yield from sorted(a_round, key=lambda part: self.reader(part) != rank)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank tells the others: where it is, and the rows that it needs parts of, in the order in which it does.

    place: says which ranks can reach each other. address: where it is reached. files: what each file is, so that names
    that mean different files are told apart.
    """

    place: str
    address: str
    files: dict[str, str]
    rows: tuple[Rows, ...]

    def to_bytes(self) -> bytes:
        """Return it in a form that travels."""
        numbers = {file: n for n, file in enumerate(self.files)}
        rows = [(numbers[file], *rest) for file, *rest in self.rows]
        told = {"place": self.place, "address": self.address, "files": list(self.files.items()), "rows": rows}
        return json.dumps(told, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, told: bytes) -> Offer | None:
        """Return what another rank told; None where it offers nothing."""
        if not told:
            return None
        found: dict[str, Any] = json.loads(told)
        names = [file for file, _ in found["files"]]
        rows = tuple(Rows(names[n], *rest) for n, *rest in found["rows"])
        return cls(found["place"], found["address"], dict(found["files"]), rows)


def offered(schedule: Schedule) -> list[Rows]:
    """Return the rows that a schedule needs a part of, in the order in which it reads them.

    Rows that it needs for two tasks are left out: they would have to be handed on twice.
    """
    found = [rows for batch in schedule.batches for rows in _rows(schedule.plan, batch)]
    times = Counter(found)
    return [rows for rows in found if times[rows] == 1]


def _rows(plan: Plan, batch: Batch) -> Iterator[Rows]:
    for n, parts in parts_of(plan, batch, least=LEAST).items():
        for part in parts:
            task = batch.tasks[part.task]
            rows = rows_of(plan, batch.reads[n], task, part) if needs_little(plan, task, part.length) else None
            if rows is not None and rows.length >= LEAST:
                yield rows


def rows_of(plan: Plan, read: Read, task: Task, part: Part) -> Rows | None:
    """Return the whole rows of which a task takes a part of each, where its part of a read is done in strips.

    There are as many units as strips, and each has the rows of one. None where the tensor does not lie row by row.
    """
    span = plan.steps[task.step].sources[task.inputs[0].source].entry.span
    if span is None or span.file != read.file:
        return None
    row, first = row_of(plan, task), read.offset + part.start
    offset = first - (first - span.offset) % row
    length = -(-(first + part.length - offset) // row) * row
    if offset + length > span.offset + span.length:
        return None
    starts = [strip.start - part.start for strip in strips(plan, task, part)]
    return Rows(read.file, offset, length, starts[1] if len(starts) > 1 else length)


def shared_rows(offers: Sequence[Offer | None], rank: int) -> dict[Rows, Shared]:
    """Return which of the rows that `rank` offers others offer as well. All ranks number them alike.

    offers: of all ranks. Nothing is shared where two ranks need the same rows in different orders, for they would wait
    for each other.
    """
    mine = offers[rank]
    if mine is None:
        return {}
    takers: dict[tuple[Any, ...], list[int]] = {}
    for other, offer in enumerate(offers):
        if offer is not None and offer.place == mine.place:
            for key in dict.fromkeys(_keys(offer)):
                takers.setdefault(key, []).append(other)
    takers = {key: ranks for key, ranks in sorted(takers.items()) if len(ranks) > 1}
    orders = {n: [key for key in _keys(offers[n]) if key in takers] for n in {r for rs in takers.values() for r in rs}}
    for one, two in combinations(orders, 2):
        both = set(orders[one]) & set(orders[two])
        if [key for key in orders[one] if key in both] != [key for key in orders[two] if key in both]:
            return {}
    numbers = {key: Shared(n, tuple(ranks)) for n, (key, ranks) in enumerate(takers.items())}
    return {rows: numbers[key] for rows, key in zip(mine.rows, _keys(mine), strict=True) if key in numbers}


def _keys(offer: Offer | None) -> list[tuple[Any, ...]]:
    return [] if offer is None else [(offer.files[rows.file], *rows[1:]) for rows in offer.rows]
