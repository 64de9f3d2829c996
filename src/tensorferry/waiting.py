"""Waiting for threads, and telling them to stop, so that an interrupt may come at any moment.

Events, conditions and the futures of `concurrent.futures` are written in Python: an interrupt (Ctrl-C) between two of
their lines leaves a lock held for ever, or one let go of twice, which ends as RuntimeError. What the main thread waits
for, or tells other threads, is therefore a `queue.SimpleQueue`, a raw lock or an attribute: each is used whole, or not
at all.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from threading import Thread
from typing import Any, Generic, TypeVar

__all__ = ["Dropped", "Flag", "Outcome", "joined", "started"]

_T = TypeVar("_T")

_BEGINNING = 0.1
"""Seconds in which a thread whose start was interrupted has begun, if it ever will."""


class Flag:
    """Something that becomes so once, by any thread, and that any thread can look at. Nobody can wait for it."""

    __slots__ = ("_is_set",)

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


class Dropped(Exception):
    """What was to be done will not be begun."""


class Outcome(Generic[_T]):
    """What becomes of something that another thread does. It is made by who waits, and ended by who does it."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends = queue.SimpleQueue[tuple[_T | None, BaseException | None]]()

    def result(self, seconds: float | None = None) -> _T:
        """Wait, and return what came of it, or raise what it raised. It is handed over: one can ask once.

        Raises `queue.Empty` where it takes longer than `seconds`, and `Dropped` where it will not be done.
        """
        result, error = self._ends.get(timeout=seconds)
        if error is None:
            return result  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # it knows this frame

    def done_by(self, work: Callable[..., _T], *arguments: Any) -> None:
        """Do it in the calling thread: ``work(*arguments)``, whatever that raises."""
        try:
            self._ends.put((work(*arguments), None))
        except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
            self._ends.put((None, error))
        finally:
            del self, work, arguments  # an error knows this frame

    def drop(self) -> None:
        """Say that it will not be done."""
        self._ends.put((None, Dropped("nobody waits for what was to be done")))


def started(thread: Thread) -> None:
    """Start a thread. An interrupt may leave it begun or not, which `joined` knows."""
    try:
        thread.start()
    except RuntimeError as error:  # `start` waits for an event of Python's library
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


def joined(thread: Thread, seconds: float | None = None) -> None:
    """Wait until a thread has ended; one whose start was interrupted, until it has begun and ended, or never does."""
    given_up = time.monotonic() + _BEGINNING
    while True:
        try:
            return thread.join(seconds)
        except RuntimeError:  # it has not begun
            if time.monotonic() > given_up:
                return None
            time.sleep(0.001)
