"""Doing reads in strips: through one small block, alone or together with other ranks of this machine."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch, Piece, Read, Task
from tensorferry.execute.base import Counters, Parameters
from tensorferry.execute.blame import reading_for
from tensorferry.execute.columns import Columns
from tensorferry.execute.exchange import LEAST, Exchange, Rows, SharedRows, need_of, needs_little
from tensorferry.execute.placing import Landing, landing
from tensorferry.execute.strips import LONG, Part, Strip, parts_of, strips
from tensorferry.execute.ways import Ways
from tensorferry.numerics.casts import writing
from tensorferry.numerics.memory import bytes_of
from tensorferry.numerics.threads import alone

__all__ = ["Cut", "InStrips"]

_PAGE = 4096


class _Together(NamedTuple):
    """Whole rows, the ranks that need parts of them, and what hands them on."""

    rows: Rows
    shared: SharedRows
    exchange: Exchange


class _Slice(NamedTuple):
    """What one task takes of a read, cut in strips, and how that is done with other ranks, if it is."""

    task: Task
    strips: list[Strip]
    together: _Together | None

    @property
    def room(self) -> int:
        return self.together.rows.each if self.together else max(strip.length for strip in self.strips)


class Cut(NamedTuple):
    """A read that is done in strips. tasks: the numbers of those that are done with it; the read is for no others."""

    read: Read
    tasks: tuple[int, ...]
    slices: tuple[_Slice, ...]

    @property
    def room(self) -> int:
        """Bytes of the block that the strips go through, one after the other. They begin anywhere in a page."""
        return _PAGE + max(one.room for one in self.slices)


@dataclass(frozen=True)
class InStrips:
    """Does reads of `plan` in strips, through `ways` and into `parameters`; may be used from several threads.

    exchange: what ranks hand each other rows by; None for a rank that reads alone. stopped: whether nothing more is to
    be read.
    """

    plan: Plan
    ways: Ways
    parameters: Parameters
    exchange: Exchange | None
    stopped: Callable[[], bool]

    def cut(self, batch: Batch, direct: Container[int]) -> dict[int, Cut]:
        """Return the reads of `batch` that are best done in strips. direct: those that go straight to their places."""
        parts = parts_of(self.plan, batch, direct, least=LEAST if self.exchange else LONG)
        found = {}
        for n, some in parts.items():
            read = batch.reads[n]
            if not (self.exchange or self.ways.splits_freely(read.file)):
                continue
            slices = tuple(self._slice(read, batch.tasks[part.task], part) for part in some)
            if self.ways.splits_freely(read.file) or any(one.together for one in slices):
                found[n] = Cut(read, tuple(part.task for part in some), slices)
        return found

    def place(self, cut: Cut, block: torch.Tensor, counters: Counters, *, in_part: bool) -> None:
        """Read and place a strip at a time, all of them through `block` (uint8, on a page). Raises ReadError.

        in_part: whether other ranks make the same read; see `Ways.best`.
        """
        way = ""
        if any(one.together is None for one in cut.slices):
            way = self.ways.best(cut.read.file, cut.read.offset, cut.read.length, in_part=in_part)
        for one in cut.slices:
            step = self.plan.steps[one.task.step]
            landed = landing(self.plan, one.task, self.parameters[step.parameter])
            with alone(), reading_for([step.sources[0].entry.name]), writing(landed.into):
                whole = one.task.inputs[0].pieces[0]
                columns = Columns.of(landed, whole) if one.strips[0].dim == 0 else None
                route = _Route(cut.read, step.parameter, landed, columns, whole, block, counters)
                if one.together is None:
                    self._place_alone(one.strips, route, way)
                else:
                    self._place_together(one.strips, route, one.together)

    def _slice(self, read: Read, task: Task, part: Part) -> _Slice:
        far = self.ways.is_far(read.file)
        return _Slice(task, list(strips(self.plan, task, part, far=far)), self._shared(read, task, part))

    def _shared(self, read: Read, task: Task, part: Part) -> _Together | None:
        """Return with whom this rank reads what a task takes; None where it does so alone."""
        if self.exchange is None or not needs_little(task):
            return None
        need = need_of(self.plan, read, task, part, far=self.ways.is_far(read.file))
        shared = None if need is None else self.exchange.shared(need.rows)
        return None if need is None or shared is None else _Together(need.rows, shared, self.exchange)

    def _place_alone(self, some: Sequence[Strip], route: _Route, way: str) -> None:
        for strip in some:
            if self.stopped():
                return
            route.put(self._read(route, route.read.offset + strip.start, strip.length, way), strip)

    def _place_together(self, some: Sequence[Strip], route: _Route, together: _Together) -> None:
        """Read this rank's share of whole rows and hand it on, and take what others hand on. A unit is a strip."""
        rows, shared, exchange = together
        way, units = self.ways.best(rows.file, rows.offset, rows.length), list(rows.units)
        first = route.read.offset + some[0].start - rows.offset
        for number in shared.in_order(len(units), exchange.rank):
            if self.stopped():
                return
            strip, (at, length) = some[number], units[number]
            if shared.reader(number) == exchange.rank:
                staged = self._read(route, at, length, way)
                exchange.give(shared, number, staged, at, self.stopped)
                route.put(staged, strip, first)
                continue
            start, stop = shared.handed_on(shared.reader(number))
            with exchange.taken(shared, number, at, length, self.stopped) as there:
                if there is not None:
                    route.put(there, strip, first - start, (stop - start, shared.row))
                    route.counters.came("from another rank", there.nbytes)
            if there is None and not self.stopped():
                route.put(self._read(route, at, length, way), strip, first)

    def _read(self, route: _Route, at: int, length: int, way: str) -> torch.Tensor:
        staged = route.block[at % _PAGE : at % _PAGE + length]
        self.ways.read(route.read.file, at, [bytes_of(staged)], route.counters, way=way)
        route.counters.bytes_read += length
        return staged


class _Route(NamedTuple):
    """Where the strips of one task come from and go to. columns: the short way there, if there is one for `whole`."""

    read: Read
    parameter: str
    landed: Landing
    columns: Columns | None
    whole: Piece
    block: torch.Tensor
    counters: Counters

    def put(self, staged: torch.Tensor, strip: Strip, offset: int = 0, squeezed: tuple[int, int] = (1, 1)) -> None:
        """Put a strip, which begins at `offset` of `staged`, where it belongs. squeezed: see `Strip.where`."""
        self.counters.copied_bytes += staged.nbytes
        if self.columns is not None:
            (now, before), (start, stop) = squeezed, (strip.piece.box.start[0], strip.piece.box.stop[0])
            stride = strip.piece.strides[0] * self.landed.dtype.block_bytes * now // before
            if self.columns.put(staged, start - self.whole.box.start[0], stop - start, offset, stride):
                return
        self.counters.lost(self.parameter, self.landed.put(staged, strip.where(offset, squeezed)))
