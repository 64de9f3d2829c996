"""Ranks of one machine hand each other what they have read: each byte comes from the disk once, to one of them.

Nobody depends on it. A rank that is not given something in time, or whose neighbour has ended, reads for itself.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from types import TracebackType
from typing import Self

import torch

from tensorferry.core.schedule import Schedule
from tensorferry.execute.exchange.links import Door, Link, Message, connected, listen, neighbourhood
from tensorferry.execute.exchange.rows import Need, Offer, Rows, SharedRows, Unit, offered, shared_rows
from tensorferry.execute.exchange.trays import Trays, nbytes_of
from tensorferry.execute.ways import Ways
from tensorferry.storage.base import Storage
from tensorferry.storage.reading import version_of
from tensorferry.waiting import joined, started

__all__ = ["Exchange", "Party"]

_PATIENCE, _PATIENCE_FAR = 5.0, 60.0
"""Seconds that a rank waits for another one before it does without it; the longer time is for stores far away."""
_MEETING = 2.0
"""Seconds in which ranks that have just agreed on a load have to find each other."""
_LOOK = 0.1
"""Seconds between two looks at whether this rank still goes on."""
_FOR_EACH = 2
"""Trays for each thread: one is filled while the other is emptied."""

_GIVEN, _KEPT, _TAKEN = range(3)
"""Messages: rows, unit and tray of what is there to be taken; rows and unit of what never will be; the tray emptied."""


class Party:
    """A rank that is about to load, before it knows of others that are. Close it when it has met them.

    schedule: what it will do, None for nothing. `offer` is for all other ranks; `meet` takes those of all.
    """

    def __init__(self, schedule: Schedule | None, storage: Storage | None) -> None:
        self._door: Door | None = None
        self._room, self._patience = 0, _PATIENCE
        self.offer = ""
        where = neighbourhood()
        needs, files = _needs(schedule, storage) if schedule is not None and storage is not None and where else ((), {})
        if schedule is not None and needs:
            self._room = schedule.max_staging - max(batch.staging for batch in schedule.batches)
        if storage is not None and any(map(Ways(storage).is_far, files)):
            self._patience = _PATIENCE_FAR
        if needs and self._room >= nbytes_of(1, max(need.rows.each for need in needs)):
            with suppress(OSError):
                self._door = Door()
                self.offer = Offer(where, self._door.address, files, needs).to_text()

    def meet(self, offers: Sequence[str], rank: int, threads: int) -> Exchange | None:
        """Return what `rank` has to do with the others, told the offers of all; None where it has nothing.

        That is so, too, where it is told its own alone, because it could ask nobody. threads: how many of it will read.
        """
        if self._door is None or len(offers) == 1:
            return None
        told = [Offer.from_text(offer) for offer in offers]
        rows = shared_rows(told, rank)
        others = {n for shared in rows.values() for n in shared.needs} - {rank}
        if not others:
            return None
        size = max(_handed_on(*one, rank) for one in rows.items())
        try:
            trays = Trays.made(min(_FOR_EACH * threads, self._room // nbytes_of(1, size)), size)
        except OSError:
            return None
        addresses = {n: offer.address for n, offer in enumerate(told) if n in others and offer is not None}
        try:
            links = connected(self._door, rank, addresses, trays, _MEETING)
        except BaseException:
            trays.close()
            raise
        try:
            return Exchange(rank, rows, trays, links, self._patience)
        except RuntimeError:  # the system has no thread left for it
            return None

    def close(self) -> None:
        """Let nobody in any more."""
        if self._door is not None:
            self._door.close()


def _needs(schedule: Schedule, storage: Storage) -> tuple[tuple[Need, ...], dict[str, str]]:
    """Return the rows that others may need as well, and what each of their files is.

    Left out are those on network file systems, of which the page cache keeps what one of them has read, and those that
    two names lead to: they would have to be handed on twice.
    """
    ways = Ways(storage)
    found = offered(schedule, ways.is_far)
    needs = [need for need in found if ways.splits_freely(need.rows.file) or ways.is_far(need.rows.file)]
    files = {file: version_of(storage, file) for file in dict.fromkeys(need.rows.file for need in needs)}
    times = Counter((files[need.rows.file], *need.rows[1:]) for need in needs)
    return tuple(need for need in needs if times[files[need.rows.file], *need.rows[1:]] == 1), files


def _handed_on(rows: Rows, shared: SharedRows, rank: int) -> int:
    """Return the bytes that `rank` hands on of a unit at most."""
    start, stop = shared.handed_on(rank)
    return rows.each // shared.row * (stop - start)


class Exchange:
    """What `rank` reads for others, and they for it. May be used from several threads; close it at the end.

    rows: what is shared, and with whom. trays: what this rank gives goes there; each thread has two. links: to those
    of the others that could be reached. Trays and links are its own from then on. patience: seconds that others are
    waited for at a time. Raises RuntimeError where no thread can be started.
    """

    def __init__(
        self,
        rank: int,
        rows: Mapping[Rows, SharedRows],
        trays: Trays,
        links: Mapping[int, Link],
        patience: float,
    ) -> None:
        self.rank, self._patience = rank, patience
        self._rows, self._trays, self._links = rows, trays, links
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # whoever may be interrupted takes the lock itself
        self._gone = {n for shared in rows.values() for n in shared.needs} - links.keys() - {rank}
        self._there: dict[Unit, int] = {}
        self._kept: set[Unit] = set()
        self._untaken: dict[int, set[int]] = {}
        self._threads, self._first = threading.local(), count(0, _FOR_EACH)
        self._ears = threading.Thread(
            target=listen, args=(links, self._heard, self._lose), name="tensorferry-exchange", daemon=True
        )
        try:
            started(self._ears)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes at most."""
        return self._trays.nbytes

    def shared(self, rows: Rows) -> SharedRows | None:
        """Return with whom `rows` are shared; None where this rank reads them for itself."""
        return self._rows.get(rows)

    def give(
        self, shared: SharedRows, number: int, data: torch.Tensor, offset: int, stopped: Callable[[], bool]
    ) -> None:
        """Hand a unit on that has just been read: `data` (uint8) from `offset` of its file. What others need is copied.

        stopped: whether this rank has no wish to go on, asked while others are waited for.
        """
        takers = [n for n in shared.needs if n != self.rank and n not in self._gone]
        tray = self._empty_tray(stopped) if takers else None
        if tray is None or not self._trays.reserve(tray):
            self._tell(takers, (_KEPT, shared.number, number, 0))
            return
        start, stop = shared.handed_on(self.rank)
        some = data.view(-1, shared.row)[:, start:stop]
        self._trays.at(tray, offset + start, some.nbytes).view(some.shape).copy_(some)
        with self._lock:
            self._untaken[tray] = set(takers)
        self._tell(takers, (_GIVEN, shared.number, number, tray))

    @contextmanager
    def taken(
        self, shared: SharedRows, number: int, offset: int, length: int, stopped: Callable[[], bool]
    ) -> Iterator[torch.Tensor | None]:
        """Lend what another rank hands on of a unit (uint8), which has `length` bytes from `offset` of its file.

        Of each row it is what `SharedRows.handed_on` says. None where it does not come: whoever asks has to read it.
        """
        unit, reader = Unit(shared.number, number), shared.reader(number)
        tray = self._awaited(unit, reader, stopped)
        if tray is None:
            yield None
            return
        start, stop = shared.handed_on(reader)
        yield self._links[reader].trays.at(tray, offset + start, length // shared.row * (stop - start))
        self._tell([reader], (_TAKEN, tray, 0, 0))

    def close(self) -> None:
        """End it; idempotent. What was handed on before can still be taken."""
        for link in self._links.values():
            link.end()
        joined(self._ears)
        for link in self._links.values():
            link.close()
        self._trays.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _empty_tray(self, stopped: Callable[[], bool]) -> int | None:
        """Return the first tray of the calling thread that is empty, so that memory is used that was used before.

        It is waited for until others have taken what is in it. Those who take too long are done without, and so is the
        tray: they may still take what is in it, at any time. None where there is no other, for one more thread than
        there should be, or one that stops.
        """
        mine = self._threads
        if not hasattr(mine, "trays"):
            first = next(self._first)
            mine.trays = range(first, min(first + _FOR_EACH, self._trays.count))
        with self._lock:
            came = self._comes(lambda: self._first_empty(mine.trays) is not None or self._are_lost(mine.trays), stopped)
            empty = self._first_empty(mine.trays)
            ran_out = not came and empty is None and not stopped()
            late = {rank for tray in mine.trays for rank in self._untaken[tray]} if ran_out else set()
        for rank in late - self._gone:
            self._lose(rank)
        return empty

    def _are_lost(self, trays: Iterable[int]) -> bool:
        """Whether each of `trays` holds what a rank that has gone has not taken."""
        return all(self._untaken.get(tray, set()) & self._gone for tray in trays)

    def _first_empty(self, trays: Iterable[int]) -> int | None:
        return next((tray for tray in trays if not self._untaken.get(tray)), None)

    def _awaited(self, unit: Unit, reader: int, stopped: Callable[[], bool]) -> int | None:
        """Wait until a unit is there, and return its tray; do without a reader that takes too long."""
        with self._lock:
            came = self._comes(lambda: unit in self._there or unit in self._kept or reader in self._gone, stopped)
            tray = self._there.pop(unit, None)
        if not came and not stopped():
            self._lose(reader)
        return tray

    def _comes(self, what: Callable[[], bool], stopped: Callable[[], bool]) -> bool:
        """Wait, with the lock held, until `what` is so; return whether it is, soon after the patience has ended."""
        until = time.monotonic() + self._patience
        while not what():
            if stopped() or time.monotonic() > until:
                return False
            self._changed.wait(_LOOK)
        return True

    def _tell(self, ranks: Iterable[int], message: Message) -> None:
        """Send a message. A rank that it does not reach is lost when all has been heard that it said before."""
        for rank in ranks:
            if rank not in self._gone and not self._links[rank].send(message):
                self._links[rank].end()

    def _heard(self, rank: int, message: Message) -> None:
        kind, one, two, tray = message
        with self._lock:
            if kind == _GIVEN:
                self._there[Unit(one, two)] = tray
            elif kind == _KEPT:
                self._kept.add(Unit(one, two))
            else:
                self._untaken.get(one, set()).discard(rank)
            self._changed.notify_all()

    def _lose(self, rank: int) -> None:
        """Do without a rank from now on, and have it see that."""
        with self._lock:
            self._gone.add(rank)
            self._changed.notify_all()
        self._links[rank].end()
