"""The same done to many files, several at a time, by threads that nobody has to wait for: a read may hang."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

__all__ = ["in_threads"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_PATIENCE = 1.0
"""Seconds that reads which have begun are waited for, after an error or an interrupt."""


def in_threads(work: Callable[[_Item], _Result], items: Sequence[_Item], threads: int) -> list[_Result]:
    """Return ``work(item)`` for each of `items`, in order, done by at most `threads` threads.

    The first error is raised; after it, as after an interrupt, nothing more is begun.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, _Result] | BaseException] = queue.SimpleQueue()
    for number in range(len(items)):
        waiting.put(number)

    def run() -> None:
        with suppress(queue.Empty):
            while True:
                number = waiting.get_nowait()
                try:
                    done.put((number, work(items[number])))
                except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
                    done.put(error)

    started: list[Thread] = []
    try:
        for _ in range(min(threads, len(items))):
            started.append(Thread(target=run, name="tensorferry-headers", daemon=True))
            started[-1].start()
        results = dict(_next(done) for _ in items)
    finally:
        _empty(waiting)
        _join(started)
        _empty(done)  # errors know frames that know this
    return [results[number] for number in range(len(items))]


def _next(done: queue.SimpleQueue[tuple[int, _Result] | BaseException]) -> tuple[int, _Result]:
    found = done.get()
    try:
        if isinstance(found, BaseException):
            raise found
        return found
    finally:
        del found  # an error knows this frame


def _empty(left: queue.SimpleQueue[Any]) -> None:
    with suppress(queue.Empty):
        while True:
            left.get_nowait()


def _join(threads: Sequence[Thread]) -> None:
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        with suppress(RuntimeError):  # one whose start was interrupted: it finds nothing to do
            thread.join(max(deadline - time.monotonic(), 0))
