"""The same done to many things, several at a time, by threads that nobody has to wait for: a read may hang."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

from tensorferry.waiting import Flag, joined, started

__all__ = ["in_threads"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_SOON = 0.0005
"""Seconds without a result after which one more thread is started."""

_PATIENCE = 1.0
"""Seconds that reads which have begun are waited for, after an error or an interrupt."""


def in_threads(
    work: Callable[[_Item], _Result], items: Sequence[_Item], threads: int, *, stop: Flag | None = None
) -> list[_Result]:
    """Return ``work(item)`` for each of `items`, in order, done by at most `threads` threads.

    There are several only where one takes a while: short pieces of Python take longer in threads that wait for each
    other. After an error, as after an interrupt, nothing more is begun. Of several errors, that of the first item is
    raised, or the one that came first where there is `stop`: that is set when no more results are wanted, for work
    that takes long to look at, and to end with errors of its own.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, _Result | BaseException, bool]] = queue.SimpleQueue()
    for number in range(len(items)):
        waiting.put(number)

    def run() -> None:
        with suppress(queue.Empty):
            while True:
                number = waiting.get_nowait()
                try:
                    done.put((number, work(items[number]), True))
                except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
                    done.put((number, error, False))

    def start() -> None:
        running.append(Thread(target=run, name="tensorferry-files", daemon=True))
        started(running[-1])

    running: list[Thread] = []
    failed: dict[int, BaseException] = {}
    results: dict[int, _Result] = {}
    try:
        while len(results) < len(items) and not failed:
            if not running:
                start()
            may_start = len(running) < min(threads, len(items))
            try:
                _sort(done.get(timeout=_SOON if may_start else None), results, failed)
            except queue.Empty:
                start()
    finally:
        _all(waiting)
        if stop is not None:
            stop.set()
        _join(running)
        _sort_all(done, results, failed if stop is None else {})
    if failed:
        try:
            raise failed[min(failed)]
        finally:
            failed.clear()  # errors know frames that know this
    return [results[number] for number in range(len(items))]


def _sort(done: tuple[int, Any, bool], results: dict[int, _Result], failed: dict[int, BaseException]) -> None:
    number, found, is_result = done
    if is_result:
        results[number] = found
    else:
        failed[number] = found


def _sort_all(done: queue.SimpleQueue[tuple[int, Any, bool]], results: dict[int, Any], failed: dict[int, Any]) -> None:
    for late in _all(done):
        _sort(late, results, failed)


def _all(left: queue.SimpleQueue[_Item]) -> list[_Item]:
    """Return what is in a queue, which is empty afterwards."""
    found: list[_Item] = []
    with suppress(queue.Empty):
        while True:
            found.append(left.get_nowait())
    return found


def _join(threads: Sequence[Thread]) -> None:
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        joined(thread, max(deadline - time.monotonic(), 0))
