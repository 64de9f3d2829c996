"""Which bytes several ranks read though each needs a part of them, and who reads which. Arithmetic; no I/O.

Of a matrix that is divided by columns each rank needs some of every row. What a rank would read whole is cut into units
of whole rows; of those that others read as well each reads its share, and hands it on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, NamedTuple

from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch, Read, Schedule, Task
from tensorferry.execute.strips import Part, bytes_of_a_strip, extent, parts_of, row_of
from tensorferry.execute.ways import OWN

__all__ = ["LEAST", "Need", "Offer", "Rows", "SharedRows", "Unit", "need_of", "needs_little", "offered", "shared_rows"]

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


class Need(NamedTuple):
    """What a rank needs of some rows: of each, which has `row` bytes, those from `start` to `stop`."""

    rows: Rows
    row: int
    start: int
    stop: int


class Unit(NamedTuple):
    """A unit by the numbers that all ranks give it: of the rows, and within them."""

    rows: int
    number: int


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows, of `row` bytes each, that several ranks need parts of.

    number: the same on all of them. needs: by the numbers of the ranks, in order, from where to where in each row.
    """

    number: int
    row: int
    needs: dict[int, tuple[int, int]]

    def reader(self, number: int) -> int:
        """Return the rank that reads the unit of that number: they take turns."""
        ranks = list(self.needs)
        return ranks[(self.number + number) % len(ranks)]

    def in_order(self, units: int, rank: int) -> Iterator[int]:
        """Yield the numbers of so many units as `rank` is to take them: of each round first its own, then others'.

        When all ranks do so, and take rows in the same order, none waits for one that waits for it.
        """
        size = len(self.needs)
        for first in range(0, units, size):
            a_round = range(first, min(first + size, units))
            yield from sorted(a_round, key=lambda number: self.reader(number) != rank)

    def handed_on(self, rank: int) -> tuple[int, int]:
        """Return from where to where in each row `rank` hands on what it reads: what all of the others need."""
        starts, stops = zip(*(need for other, need in self.needs.items() if other != rank), strict=True)
        return min(starts), max(stops)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank tells the others: where it is, and the rows that it needs parts of, in the order in which it does.

    neighbourhood: says which ranks can reach each other. address: where it is reached. files: what each file is, so
    that names that mean different files are told apart.
    """

    neighbourhood: str
    address: str
    files: dict[str, str]
    needs: tuple[Need, ...]

    def to_text(self) -> str:
        """Return it in a form that travels."""
        numbers = {file: n for n, file in enumerate(self.files)}
        needs = [(numbers[rows.file], *rows[1:], *rest) for rows, *rest in self.needs]
        files = list(self.files.items())
        told = {"neighbourhood": self.neighbourhood, "address": self.address, "files": files, "needs": needs}
        return json.dumps(told, separators=(",", ":"))

    @classmethod
    def from_text(cls, told: str) -> Offer | None:
        """Return what another rank told; None where it offers nothing."""
        if not told:
            return None
        found: dict[str, Any] = json.loads(told)
        names = [file for file, _ in found["files"]]
        needs = tuple(Need(Rows(names[n], *rest[:3]), *rest[3:]) for n, *rest in found["needs"])
        return cls(found["neighbourhood"], found["address"], dict(found["files"]), needs)


def offered(schedule: Schedule, is_far: Callable[[str], bool] = lambda file: False) -> list[Need]:
    """Return what a schedule needs of rows of which it needs but a part, in the order in which it reads them.

    Rows that it needs for two tasks are left out: they would have to be handed on twice. is_far: whether requests for a
    file take so long that one for several tasks is not to become one for each.
    """
    found = [need for batch in schedule.batches for need in _needs(schedule.plan, batch, is_far)]
    times = Counter(need.rows for need in found)
    return [need for need in found if times[need.rows] == 1]


def _needs(plan: Plan, batch: Batch, is_far: Callable[[str], bool]) -> Iterator[Need]:
    little = {number for number, task in enumerate(batch.tasks) if needs_little(task)}
    for n, parts in parts_of(plan, batch, least=LEAST).items() if little else ():
        far = is_far(batch.reads[n].file)
        if far and len(parts) > 1:
            continue
        for part in parts:
            if part.task in little:
                need = need_of(plan, batch.reads[n], batch.tasks[part.task], part, far=far)
                if need is not None and need.rows.length >= LEAST:
                    yield need


def needs_little(task: Task) -> bool:
    """Whether a task takes some of each row of a tensor, as columns, and leaves a good part to other ranks."""
    if len(task.inputs) != 1 or len(task.inputs[0].pieces) != 1:
        return False
    (piece,) = task.inputs[0].pieces
    return piece.box.size < OWN * extent(piece)


def need_of(plan: Plan, read: Read, task: Task, part: Part, *, far: bool = False) -> Need | None:
    """Return what a task needs of whole rows, where its part of a read is done in strips.

    The rows have as many units as there are strips. None where the tensor does not lie row by row. far: see `strips`.
    """
    span = plan.steps[task.step].sources[task.inputs[0].source].entry.span
    if span is None or span.file != read.file:
        return None
    row, first = row_of(plan, task), read.offset + part.start
    start = (first - span.offset) % row
    length = -(-(start + part.length) // row) * row
    if first - start + length > span.offset + span.length:
        return None
    rows = Rows(read.file, first - start, length, min(bytes_of_a_strip(plan, task, far=far), length))
    return Need(rows, row, start, start + part.length - (length - row))


def shared_rows(offers: Sequence[Offer | None], rank: int) -> dict[Rows, SharedRows]:
    """Return which of the rows that `rank` offers others offer as well. All ranks number them alike.

    offers: of all ranks. Nothing is shared where ranks need the same rows in orders that go round in a circle, for they
    would wait for each other.
    """
    mine = offers[rank]
    if mine is None:
        return {}
    takers: dict[_Key, dict[int, tuple[int, int]]] = {}
    for other, offer in enumerate(offers):
        if offer is not None and offer.neighbourhood == mine.neighbourhood:
            for key, need in zip(_keys(offer), offer.needs, strict=True):
                takers.setdefault(key, {})[other] = need.start, need.stop
    takers = {key: needs for key, needs in sorted(takers.items()) if len(needs) > 1}
    orders = {n: [k for k in _keys(offers[n]) if k in takers] for n in {r for needs in takers.values() for r in needs}}
    before: dict[_Key, set[_Key]] = {}
    for order in orders.values():
        for one, two in pairwise(order):
            before.setdefault(two, set()).add(one)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return {}
    numbers = {key: SharedRows(n, key[-1], needs) for n, (key, needs) in enumerate(takers.items())}
    return {need.rows: numbers[k] for need, k in zip(mine.needs, _keys(mine), strict=True) if k in numbers}


_Key = tuple[str, int, int, int, int]
"""Which file, then offset, length, unit and row in bytes."""


def _keys(offer: Offer | None) -> list[_Key]:
    if offer is None:
        return []
    return [(offer.files[rows.file], rows.offset, rows.length, rows.each, row) for rows, row, *_ in offer.needs]
