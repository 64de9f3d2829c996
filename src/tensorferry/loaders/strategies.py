"""The strategies "eager" and "prefetch": one thread that keeps ahead of what is read, within a bound, and is joined.

The strategy "lazy" needs nothing from here. What is read and where it goes, the schedule or the stream decides.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, Self

import torch

from tensorferry.config import LoadConfig, ReadOptions
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.schedule import Read, Schedule
from tensorferry.execute.base import Counters, Executor, OnReady, Parameters
from tensorferry.execute.exchange import Exchange
from tensorferry.execute.making import reads_of
from tensorferry.execute.pool import PATIENCE
from tensorferry.execute.stream import stream
from tensorferry.execute.threaded import ThreadedExecutor
from tensorferry.progress import SILENT, Progress
from tensorferry.storage.base import File, Storage, SupportsReadAhead
from tensorferry.storage.reading import kind_of, scatter
from tensorferry.waiting import joined, started

__all__ = ["Ahead", "Eager", "EagerExecutor", "Prefetch", "PrefetchExecutor", "executor_for", "halved", "streamed"]


class Ahead:
    """A storage through which another one is read, with a thread that runs ahead of it inside ``with``.

    reads: what will be read, in about that order. bound: most bytes that the thread is ahead. block: most bytes that
    it takes at once.
    """

    def __init__(self, storage: Storage, reads: Iterable[Read], *, bound: int, block: int) -> None:
        self._inner = storage
        self._reads = list(reads)
        self._bound = bound
        self._block = min(block, max(bound // 2, 1))
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)  # whoever may be interrupted takes the lock itself
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="tensorferry-ahead", daemon=True)

    @property
    def uri(self) -> str:
        return self._inner.uri

    def list(self) -> Sequence[File]:
        return self._inner.list()

    def stat(self, path: str) -> File:
        return self._inner.stat(path)

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        self.read_vector(path, offset, (out,))

    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        raise NotImplementedError

    def check_unchanged(self) -> None:
        self._inner.check_unchanged()

    def close(self) -> None:
        self._inner.close()

    def correct(self, counters: Counters) -> None:
        """Make `counters`, which saw only what was asked for, say what was read for it."""

    def __enter__(self) -> Self:
        try:
            started(self._thread)
        except BaseException:  # it may run all the same
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._stopped = True
            self._turn.notify_all()
        joined(self._thread, PATIENCE)  # a read that hangs is not waited for

    def _run(self) -> None:
        try:
            self._go_ahead()
        except Exception:  # noqa: BLE001 - storages of others raise what they like
            pass  # Whoever reads there next meets the same fault, and is the one to tell of it.
        finally:
            with self._lock:
                self._stopped = True
                self._turn.notify_all()

    def _go_ahead(self) -> None:
        raise NotImplementedError


class Prefetch(Ahead):
    """Announces reads to the storage before they come, so that the kernel has their bytes ready."""

    _used = _announced = 0

    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        scatter(self._inner, path, offset, outs)
        with self._lock:
            self._used += sum(out.nbytes for out in outs)
            self._turn.notify_all()

    def _go_ahead(self) -> None:
        if not isinstance(self._inner, SupportsReadAhead):
            return
        for piece in _pieces(self._reads, self._block):
            with self._lock:
                while not self._stopped and self._announced + piece.length - self._used > self._bound:
                    self._turn.wait()
                if self._stopped:
                    return
                self._announced += piece.length
            self._inner.read_ahead(piece.file, piece.offset, piece.length)


class Eager(Ahead):
    """Reads the files from end to end into blocks, and serves what is asked for out of them.

    Blocks behind the last one asked for make room for new ones; whoever comes back for them reads the storage.
    """

    def __init__(self, storage: Storage, reads: Iterable[Read], *, bound: int, block: int) -> None:
        super().__init__(storage, reads, bound=bound, block=block)
        files = [storage.stat(path) for path in dict.fromkeys(r.file for r in self._reads)]
        whole = [Read(file.path, 0, file.size) for file in files]
        self._plan = list(_pieces(whole, self._block))
        self._first: dict[str, int] = {}
        for number, piece in enumerate(self._plan):
            self._first.setdefault(piece.file, number)
        self._blocks: dict[int, memoryview] = {}
        self._next = self._asked = 0
        self._count = Counters()

    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        for out in outs:
            view = out if out.format == "B" and out.ndim == 1 else out.cast("B")
            while view:
                done = self._from_block(path, offset, view) or self._directly(path, offset, view)
                view, offset = view[done:], offset + done

    def correct(self, counters: Counters) -> None:
        counters.bytes_read, counters.reads = self._count.bytes_read, self._count.reads
        counters.staging_peak += self._count.staging_peak
        counters.direct_bytes = 0

    def _go_ahead(self) -> None:
        for number, piece in enumerate(self._plan):
            with self._lock:
                while not self._stopped and not self._makes_room(piece.length):
                    self._turn.wait()
                if self._stopped:
                    return
            block = memoryview(bytearray(piece.length))
            self._inner.read_into(piece.file, piece.offset, block)
            with self._lock:
                self._blocks[number] = block
                self._next = number + 1
                self._tell(piece.length, 1)
                self._turn.notify_all()

    def _makes_room(self, nbytes: int) -> bool:
        while self._held() + nbytes > self._bound and (oldest := min(self._blocks, default=self._asked)) < self._asked:
            del self._blocks[oldest]
        return self._held() + nbytes <= self._bound

    def _held(self) -> int:
        return sum(map(len, self._blocks.values()))

    def _from_block(self, path: str, offset: int, out: memoryview) -> int:
        """Copy what one block has of a range, once it is there, and return how much; 0 where none will have it."""
        number = self._first.get(path, len(self._plan)) + offset // self._block
        if number >= len(self._plan) or self._plan[number].file != path:
            return 0
        with self._lock:
            self._asked = max(self._asked, number)
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._stopped or number < self._next)
            part = self._blocks.get(number, memoryview(b""))[offset % self._block :][: len(out)]
            out[: len(part)] = part
            return len(part)

    def _directly(self, path: str, offset: int, out: memoryview) -> int:
        size = min(len(out), self._block)
        self._inner.read_into(path, offset, out[:size])
        with self._lock:
            self._tell(size, 1)
        return size

    def _tell(self, nbytes: int, reads: int) -> None:
        self._count.bytes_read += nbytes
        self._count.reads += reads
        self._count.staging_peak = max(self._count.staging_peak, self._held())


class _AheadExecutor:
    """The threaded executor, with one thread, reading through an `Ahead`."""

    ahead: ClassVar[type[Ahead]]

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def run(
        self,
        schedule: Schedule,
        storage: Storage,
        parameters: Parameters,
        *,
        on_ready: OnReady | None = None,
        progress: Progress = SILENT,
    ) -> Counters:
        """Fill `parameters`; see `Executor`."""
        reads = [read for batch in schedule.batches for read in batch.reads]
        options = _settled(self._options, storage, reads)
        with self.ahead(storage, reads, bound=options.max_staging, block=options.max_read) as reading:
            counters = ThreadedExecutor(1).run(schedule, reading, parameters, on_ready=on_ready, progress=progress)
        reading.correct(counters)
        return counters


class PrefetchExecutor(_AheadExecutor):
    """Fills parameters by the strategy "prefetch"."""

    ahead = Prefetch


class EagerExecutor(_AheadExecutor):
    """Fills parameters by the strategy "eager"."""

    ahead = Eager


_EXECUTORS: dict[str, type[_AheadExecutor]] = {"eager": EagerExecutor, "prefetch": PrefetchExecutor}


def executor_for(config: LoadConfig, exchange: Exchange | None = None) -> Executor:
    """Return what fills parameters by the strategy that is configured; "lazy" ones do it together with other ranks."""
    if config.strategy == "lazy":
        return ThreadedExecutor.of(config.reading, exchange)
    return _EXECUTORS[config.strategy](halved(config))


def halved(config: LoadConfig) -> ReadOptions:
    """Return the options for reading by the configured strategy: "eager" stages twice, each with half the bound."""
    options = config.reading
    if config.strategy != "eager":
        return options
    half = max(4096, options.max_staging // 2)
    return replace(options, max_staging=half, max_read=min(options.max_read, half))


def streamed(
    config: LoadConfig, storage: Storage, entries: Sequence[TensorEntry], counters: Counters
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield names and values as `stream` does, by the strategy that is configured."""
    reads = (read for entry in entries for read in reads_of(entry))
    options = _settled(halved(config), storage, (read for entry in entries[:1] for read in reads_of(entry)))
    if config.strategy == "lazy":
        yield from stream(storage, entries, options, counters)
        return
    kind = _EXECUTORS[config.strategy].ahead
    with kind(storage, reads, bound=options.max_staging, block=options.max_read) as reading:
        yield from stream(reading, entries, options, counters)
    reading.correct(counters)


def _settled(options: ReadOptions, storage: Storage, reads: Iterable[Read]) -> ReadOptions:
    """Return the options for the kind of storage that the first of `reads` asks."""
    first = next(iter(reads), None)
    return options if first is None else options.settled(kind_of(storage, first.file))


def _pieces(reads: Iterable[Read], block: int) -> Iterator[Read]:
    for read in reads:
        for offset, length in read.runs:
            for at in range(0, length, block):
                yield Read(read.file, offset + at, min(block, length - at))
