"""Threads that do what they are given, in order. Nobody has to wait for them: a read that hangs must not hang us."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from tensorferry.numerics.threads import take_share
from tensorferry.waiting import Flag, Outcome, joined, started

__all__ = ["PATIENCE", "Readers"]

_T = TypeVar("_T")

PATIENCE = 1.0
"""Seconds that a load that fails or is interrupted waits for reads that have begun."""


class _Job(NamedTuple):
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    outcome: Outcome[Any]
    ended: queue.SimpleQueue[Outcome[Any]] | None


class Readers(Generic[_T]):
    """At most `threads` threads, started as they are needed. They end with `close`, or with the process."""

    _told = True
    """Whether the threads know that there is nothing more to do."""

    def __init__(self, threads: int) -> None:
        self.most = threads
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._dropped = Flag()

    def submit(
        self, work: Callable[..., _T], *arguments: Any, ended: queue.SimpleQueue[Outcome[_T]] | None = None
    ) -> Outcome[_T]:
        """Have ``work(*arguments)`` done by a thread, after all that was submitted before.

        ended: where the outcome is put when it is there. What is dropped is not put there.
        """
        job = _Job(work, arguments, Outcome(), ended)
        self._told = False
        self._jobs.put(job)
        if len(self._threads) < self.most:
            thread = threading.Thread(
                target=_run, args=(self._jobs, self._dropped, self.most), name="tensorferry", daemon=True
            )
            self._threads.append(thread)
            started(thread)
        return job.outcome

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
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job.outcome.drop()
        for _ in self._threads:
            self._jobs.put(None)
        self._told = True

    def __del__(self) -> None:
        if not self._told:
            self._end()  # an interrupt may have come before all of them were told


def _run(jobs: queue.SimpleQueue[_Job | None], dropped: Flag, among: int) -> None:
    take_share(among)
    while (job := jobs.get()) is not None:
        if dropped.is_set():
            job.outcome.drop()
            continue
        job.outcome.done_by(job.work, *job.arguments)
        if job.ended is not None:
            job.ended.put(job.outcome)
        del job  # or what the last one made would live as long as the thread
