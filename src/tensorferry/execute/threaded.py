"""The ordinary executor: a few threads read batches, straight into parameters where a copy would change nothing.

What may be in memory at once is bounded by the schedule's `max_staging`. The first error wins, the others stop
within one read, and no thread is left behind, but where a read hangs: that is waited for a second, and no longer.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, Self

import torch

from tensorferry.config import Direct, ReadOptions
from tensorferry.core.amounts import counted
from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch, Read, Schedule, Task
from tensorferry.core.steps import is_packed
from tensorferry.execute.base import Counters, OnReady, Parameters, Remaining
from tensorferry.execute.blame import entries_of, reading_for
from tensorferry.execute.device import DeviceExecutor, any_on_devices
from tensorferry.execute.exchange import Exchange
from tensorferry.execute.in_strips import Cut, InStrips
from tensorferry.execute.lending import LentReads
from tensorferry.execute.placing import in_place, perform
from tensorferry.execute.pool import PATIENCE, Readers
from tensorferry.execute.staging import Staging
from tensorferry.execute.ways import Ways, reads_in_part
from tensorferry.numerics.dequantize import foresee
from tensorferry.numerics.memory import bytes_of, return_free_memory
from tensorferry.progress import SILENT, Progress
from tensorferry.storage.base import Storage, StorageKind
from tensorferry.storage.gpu_direct import Use
from tensorferry.storage.reading import kind_of
from tensorferry.waiting import Flag, Outcome

__all__ = ["ThreadedExecutor"]


_RETURNED = 16 << 20
"""Bytes of temporary tensors after which freed memory is handed back: each thread would keep its own share of it."""
_PAGE, _PAGED = 4096, 256 << 10
"""Bytes of a page, and bytes from which on a read is staged on an address that suits direct reads."""


class ThreadedExecutor:
    """Runs batches in `threads` threads, in the order of the schedule.

    pinned: leave parameters on GPUs to a `DeviceExecutor`, which stages in pinned memory. gpu_direct: its option.
    direct, keep_cache, shared: as in `ReadOptions`. turn: `ReadOptions.settled_turn`. copiers: how many threads there
    are at most where nearly all that is read lies in the page cache, so that nobody waits for a disk; None for
    `threads`. exchange: what other ranks read for this one, and it for them; ended early where there is no use for it.
    suited_to: returns the options for a kind of storage, which say how many threads there are, as soon as it is known.
    """

    def __init__(
        self,
        threads: int,
        *,
        copiers: int | None = None,
        pinned: bool = True,
        gpu_direct: Use = "never",
        direct: Direct = "auto",
        keep_cache: bool = True,
        shared: bool = False,
        turn: tuple[int, int] = (0, 1),
        exchange: Exchange | None = None,
        suited_to: Callable[[StorageKind], ReadOptions] | None = None,
    ) -> None:
        self.suited_to = suited_to
        self.threads = threads
        self.copiers = threads if copiers is None else min(copiers, threads)
        self.pinned = pinned
        self.gpu_direct = gpu_direct
        self.direct: Direct = direct
        self.keep_cache = keep_cache
        self.shared = shared
        self.turn = turn
        self.exchange = exchange

    @classmethod
    def of(cls, options: ReadOptions, exchange: Exchange | None = None) -> Self:
        """Return the executor that reads as `options` say."""
        return cls(
            options.workers,
            copiers=options.copiers,
            pinned=options.pinned,
            gpu_direct=options.gpu_direct,
            direct=options.direct,
            keep_cache=options.keep_cache,
            shared=options.is_shared,
            turn=options.settled_turn,
            exchange=exchange,
            suited_to=options.settled if options.storage_kind == "auto" else None,
        )

    def run(
        self,
        schedule: Schedule,
        storage: Storage,
        parameters: Parameters,
        *,
        on_ready: OnReady | None = None,
        progress: Progress = SILENT,
    ) -> Counters:
        """Fill `parameters`; see `Executor`. `parameters` is looked up from several threads."""
        foresee(_elements_decoded(schedule.plan))
        if self.pinned and any_on_devices(parameters, schedule.plan):
            if self.exchange is not None:
                self.exchange.close()
            schedule = schedule.begun_at(*self.turn)
            how: Any = {"direct": self.direct, "keep_cache": self.keep_cache, "shared": self.shared}
            others = ThreadedExecutor(self.threads, copiers=self.copiers, pinned=False, **how)
            executor = DeviceExecutor(self.threads, others, gpu_direct=self.gpu_direct, **how)
            return executor.run(schedule, storage, parameters, on_ready=on_ready, progress=progress)
        ways = Ways(storage, self.direct, self.keep_cache, self.shared)
        reads = [read for batch in schedule.batches for read in batch.reads]
        ways.refuse_impossible(read.file for read in reads)
        cached = ways.find_cached(reads)
        exchange = self.exchange
        if cached and exchange is not None:  # nobody waits for the disk, so copying on would be all there is to it
            exchange.close()
            exchange = None
        # Ranks that hand each other what they read go through it side by side; else each begins elsewhere.
        run = _Run(schedule if exchange else schedule.begun_at(*self.turn), ways, parameters, exchange)
        progress.start(schedule.bytes_read, "weights")
        readers = Readers[int](self._threads(run, reads, cached=cached))
        try:
            self._feed(run, readers, on_ready, progress)
        except BaseException as error:
            run.cancelled.set()
            if hanging := readers.close(PATIENCE):
                error.add_note(
                    f"tensorferry: {counted(hanging, 'read')} of {storage.uri} did not return within {PATIENCE:.0f} s "
                    "and may still write to parameters when that ends: do not use them"
                )
            raise
        else:
            readers.close()
        finally:
            run.error = None  # it knows this frame, and this frame it: nothing would be freed
            progress.finish()
        run.counters.staging_peak = run.staging.peak + (exchange.nbytes if exchange else 0)
        return run.counters

    def _threads(self, run: _Run, reads: Sequence[Read], *, cached: bool) -> int:
        """Return how many threads read. Each of those that ask far away holds an answer beside what is staged of it,
        for which what ranks hand on leaves less room."""
        threads, copiers = self.threads, self.copiers
        if self.suited_to is not None and reads:
            options = self.suited_to(kind_of(run.ways.storage, reads[0].file))
            threads, copiers = options.workers, min(options.copiers, options.workers)
        if run.exchange is not None and any(run.ways.is_far(read.file) for read in reads[:1]):
            threads = min(threads, max(1, run.bound // (2 * max(read.length for read in reads))))
        return copiers if cached else threads

    def _feed(self, run: _Run, readers: Readers[int], on_ready: OnReady | None, progress: Progress) -> None:
        bound, in_flight, waiting = run.bound, 0, 0
        remaining = Remaining.of_tasks(run.schedule)

        def settle() -> None:
            nonlocal in_flight, waiting
            outcome = run.finished.get()
            if run.error is not None:
                raise run.error
            number = outcome.result()
            batch = run.schedule.batches[number]
            in_flight -= run.sizes[number]
            waiting -= 1
            progress.advance(batch.length)
            for task in batch.tasks:
                name = run.schedule.plan.steps[task.step].parameter
                if remaining.done(name) and on_ready is not None:
                    on_ready(name)

        for number, size in enumerate(run.sizes):
            while waiting and (in_flight + size > bound or waiting >= 4 * readers.most):
                settle()
            in_flight += size
            waiting += 1
            readers.submit(run.work, number, ended=run.finished)
        while waiting:
            settle()


def _elements_decoded(plan: Plan) -> int:
    return sum(s.into.size for s in plan.steps if s.via is not None and is_packed([one.entry for one in s.sources]))


@dataclass
class _Run:
    """What the threads of one run share."""

    schedule: Schedule
    ways: Ways
    parameters: Parameters
    exchange: Exchange | None = None
    counters: Counters = field(default_factory=Counters)
    finished: queue.SimpleQueue[Outcome[int]] = field(default_factory=queue.SimpleQueue)
    cancelled: Flag = field(default_factory=Flag)
    lock: threading.Lock = field(default_factory=threading.Lock)
    freed: int = 0
    error: BaseException | None = None
    """The first error of any thread; there before `cancelled` is set, and so before a batch is left undone."""

    def __post_init__(self) -> None:
        self.sizes = [_layout(batch.reads)[1] + batch.room for batch in self.schedule.batches]
        plan, stopped = self.schedule.plan, self.cancelled.is_set
        self.lent = LentReads(plan, self.ways, self.parameters, stopped)
        self.strips = InStrips(plan, self.ways, self.parameters, self.exchange, stopped)
        self.bound = self.schedule.max_staging - (self.exchange.nbytes if self.exchange else 0)
        self.staging = Staging(min(max(self.sizes, default=0), self.bound), self.bound)

    def work(self, number: int) -> int:
        """Read and place one batch, in a thread of the pool; where that fails, no thread begins another read."""
        if self.cancelled.is_set():
            return number
        try:
            counters = self._moved(self.schedule.batches[number])
        except BaseException as error:  # noqa: BLE001 - whoever settles batches raises it
            with self.lock:
                self.error = self.error or error
            self.cancelled.set()
            return number  # an outcome that kept the error would keep this frame, and all that it knows
        with self.lock:
            self.counters.absorb(counters)
            self.freed += self.schedule.batches[number].room
            returns, self.freed = self.freed >= _RETURNED, self.freed % _RETURNED
        if returns:
            return_free_memory()
        return number

    def _moved(self, batch: Batch) -> Counters:
        counters = Counters()
        if self.exchange is None:  # else others wait for what this rank reads
            batch = self.lent.place(batch, counters)
        direct, cut, rest = self._sort_out(batch)
        # Where all goes straight to its place, holes are too small to ask for; it takes time for each task.
        asks = self.ways.shared and len(direct) < len(batch.reads)
        in_part = reads_in_part(self.schedule.plan, batch) if asks else ()
        elsewhere = direct.keys() | cut.keys()
        where, size = _layout([None if n in elsewhere else r for n, r in enumerate(batch.reads)])
        begin = -(-size // _PAGE) * _PAGE
        strip = max((one.room for one in cut.values()), default=0)
        with self.staging.lend(begin + strip if strip else size, room=batch.room) as block:
            staged = [block[at : at + length] for at, length in where]
            for n, read in enumerate(batch.reads):
                if self.cancelled.is_set():
                    return counters
                if n in cut:
                    self.strips.place(cut[n], block[begin:], counters, in_part=n in in_part)
                else:
                    outs = direct[n].outs if n in direct else [staged[n]]
                    with reading_for(entries_of(self.schedule.plan, batch, n)):
                        _read(self.ways, read, [bytes_of(out) for out in outs], counters, in_part=n in in_part)
                    counters.direct_bytes += direct[n].placed if n in direct else 0
                    counters.copied_bytes += 0 if n in direct else read.length
                    counters.bytes_read += read.length
                counters.reads += read.times
            for task in rest:
                name = self.schedule.plan.steps[task.step].parameter
                counters.lost(name, perform(self.schedule.plan, task, staged, self.parameters[name]))
        return counters

    def _sort_out(self, batch: Batch) -> tuple[dict[int, _Tiling], dict[int, Cut], list[Task]]:
        """Return the reads that can go straight into parameters, with where, those that are done in strips, and the
        tasks that are left."""
        plan = self.schedule.plan
        users: dict[int, list[_Use]] = defaultdict(list)
        for task in batch.tasks:
            parameter = self.parameters[plan.steps[task.step].parameter]
            into = in_place(plan, task, parameter)
            for part in task.inputs:
                for piece in part.pieces:
                    users[piece.read].append((piece.offset, into))
        if not users:  # nothing is read: what is filled, and what is made of inputs without elements
            return {}, {}, list(batch.tasks)
        direct: dict[int, _Tiling] = {}
        for n, uses in users.items():
            tiling = _tiling(uses, batch.reads[n].length)
            if tiling is not None:
                direct[n] = tiling
        if direct.keys() == users.keys():
            return direct, {}, [task for task in batch.tasks if not task.inputs]
        cut = self.strips.cut(batch, direct)
        done = {number for one in cut.values() for number in one.tasks}
        rest = [
            task
            for number, task in enumerate(batch.tasks)
            if number not in done
            and (not task.inputs or any(p.read not in direct for i in task.inputs for p in i.pieces))
        ]
        return direct, cut, rest


def _read(ways: Ways, read: Read, outs: Sequence[memoryview], counters: Counters, *, in_part: bool) -> None:
    if read.times == 1:
        ways.read(read.file, read.offset, outs, counters, in_part=in_part)
        return
    (out,) = outs  # runs are joined with nothing else, so there are no holes
    ways.read_runs(read.file, read.offset, read.stride, read.run, out, counters)


def _layout(reads: Sequence[Read | None]) -> tuple[list[tuple[int, int]], int]:
    """Return (start, length) in a staging block for each read, and the size of the block.

    A byte lies on the same address modulo 64 as in its file, so that what is aligned there is aligned here; modulo a
    page where the read is long, so that it can be read directly.
    """
    where, at = [], 0
    for read in reads:
        if read is None:
            where.append((0, 0))
            continue
        at += (read.offset - at) % (_PAGE if read.length >= _PAGED else 64)
        where.append((at, read.length))
        at += read.length
    return where, at


class _Tiling(NamedTuple):
    """Tensors that take up a read in order, scratch ones for holes; `placed` bytes of it go into parameters."""

    outs: list[torch.Tensor]
    placed: int


_Use = tuple[int, torch.Tensor | None]
"""Where in a read a piece begins, and the memory that it goes to as it is; None where it does not."""


def _tiling(uses: list[_Use], length: int) -> _Tiling | None:
    """Return what takes up a read of `length` bytes without staging.

    None where some of the bytes have to be staged.
    """
    at, placed, targets = 0, 0, []
    for offset, into in sorted(uses, key=itemgetter(0)):
        if into is None or offset < at:
            return None
        if offset > at:
            targets.append(torch.empty(offset - at, dtype=torch.uint8, device="cpu"))
        targets.append(into)
        nbytes = into.nbytes
        at, placed = offset + nbytes, placed + nbytes
    return _Tiling(targets, placed) if at == length else None
