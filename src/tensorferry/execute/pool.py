"""Threads that do what they are given, in order. Nobody has to wait for them: a read that hangs must not hang us."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from tensorferry.numerics.threads import take_share

__all__ = ["PATIENCE", "Readers", "joined"]

_T = TypeVar("_T")

PATIENCE = 1.0
"""Seconds that a load that fails or is interrupted waits for reads that have begun."""

_BEGINNING = 0.1
"""Seconds in which a thread whose start was interrupted has begun, if it ever will."""


class _Job(NamedTuple):
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: Future[Any]


class Readers(Generic[_T]):
    """At most `threads` threads, started as they are needed. They end with `close`, or with the process."""

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._dropped = threading.Event()

    def submit(self, work: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Have ``work(*arguments)`` done by a thread, after all that was submitted before."""
        job = _Job(work, arguments, Future())
        self._jobs.put(job)
        if len(self._threads) < self._most:
            thread = threading.Thread(
                target=_run, args=(self._jobs, self._dropped, self._most), name="tensorferry", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return job.future

    def close(self, patience: float | None = None) -> int:
        """Drop what was not begun, wait for what was, and return how many threads are left: those that hang.

        patience: seconds that are waited in all, None for as long as it takes. A thread that is left keeps alive what
        it reads into, and ends with its read.
        """
        self._end()
        deadline = None if patience is None else time.monotonic() + patience
        for thread in self._threads:
            joined(thread, None if deadline is None else max(deadline - time.monotonic(), 0))
        return sum(thread.is_alive() for thread in self._threads)

    def _end(self) -> None:
        self._dropped.set()
        with suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is None or job.future.cancel():
                pass
        for _ in self._threads:
            self._jobs.put(None)

    def __del__(self) -> None:
        if hasattr(self, "_dropped"):
            self._end()  # an interrupt may have come before all of them were told


def joined(thread: threading.Thread, seconds: float | None = None) -> None:
    """Wait until a thread has ended; one whose start was interrupted, until it has begun and ended, or never does."""
    given_up = time.monotonic() + _BEGINNING
    while True:
        try:
            return thread.join(seconds)
        except RuntimeError:  # it has not begun
            if time.monotonic() > given_up:
                return None
            time.sleep(0.001)


def _run(jobs: queue.SimpleQueue[_Job | None], dropped: threading.Event, among: int) -> None:
    take_share(among)
    while (job := jobs.get()) is not None:
        if dropped.is_set():
            job.future.cancel()
            continue
        try:
            job.future.set_result(job.work(*job.arguments))
        except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
            job.future.set_exception(error)
        del job  # or what the last one made would live as long as the thread
