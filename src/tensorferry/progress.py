"""Telling how far a load is, in bytes: a bar on a terminal, a few plain lines elsewhere, or nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from tensorferry.core.amounts import human_bytes
from tensorferry.errors import ConfigError, shown

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["SILENT", "Bar", "Lines", "Progress", "Silent", "for_stream", "progress_of"]


class Progress(Protocol):
    """Is told of a load in bytes. One value serves several phases, one after the other.

    `advance` may be called from several threads. Implementations never raise: telling of a load must not end it.
    """

    def start(self, total: int, what: str) -> None:
        """`total` bytes will be moved for `what`."""
        ...

    def advance(self, nbytes: int) -> None:
        """`nbytes` more have been moved."""
        ...

    def finish(self) -> None:
        """Nothing more will come, for good or ill. Idempotent."""
        ...


class Silent:
    """Says nothing."""

    def start(self, total: int, what: str) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def finish(self) -> None:
        pass


SILENT: Progress = Silent()


class Lines:
    """Writes a line when another tenth of the bytes has come and `seconds` have passed, and one at the end.

    For logs and pipes: plain ASCII, no carriage returns, at most ten lines for a phase of any length. `clock` counts
    seconds. A `stream` that is closed or full is given up on.
    """

    def __init__(self, stream: TextIO, *, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._seconds, self._clock = stream, seconds, clock
        self._lock = threading.Lock()
        self._what = ""
        self._total = self._done = self._tenths = 0
        self._began = self._said = 0.0
        self._open = False

    def start(self, total: int, what: str) -> None:
        with self._lock:
            self._what = shown(what).encode("ascii", "backslashreplace").decode()
            self._total, self._done, self._tenths = total, 0, 0
            self._began = self._said = self._clock()
            self._open = True

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            tenths, now = self._done * 10 // max(self._total, 1), self._clock()
            if self._tenths < tenths < 10 and now - self._said >= self._seconds:
                self._tenths, self._said = tenths, now
                self._say(now)

    def finish(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._say(self._clock())

    def _say(self, now: float) -> None:
        share = 100 * self._done // self._total if self._total else 100
        done, total = human_bytes(self._done), human_bytes(self._total)
        try:
            self._stream.write(f"{self._what}: {share}% ({done} of {total}) after {now - self._began:.1f} s\n")
            self._stream.flush()
        except (OSError, ValueError):  # a pipe that nobody reads any more, or a closed file
            self._open = False


class Bar:
    """Draws a bar with bytes, bytes per second and the time that is left on a terminal, with rich."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def start(self, total: int, what: str) -> None:
        # Not at the top: listing a checkpoint draws no bar.
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        self.finish()
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        console = Console(file=self._stream)
        self._bar = RichProgress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task(escape(shown(what)), total=total)
        self._bar.start()

    def advance(self, nbytes: int) -> None:
        bar, task = self._bar, self._task
        if bar is not None and task is not None:
            bar.advance(task, nbytes)

    def finish(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


def for_stream(stream: TextIO | None = None, *, rank: int | None = None) -> Progress:
    """Return what suits `stream` (default: standard error): a bar on a terminal, lines elsewhere.

    Of several ranks only rank 0 tells anything. rank: of this process; without it, the variable ``RANK`` that
    torchrun and its like set, and 0 where there is none.
    """
    stream = sys.stderr if stream is None else stream
    if stream is None or (_rank_of_process() if rank is None else rank) != 0:
        return SILENT
    return Bar(stream) if stream.isatty() else Lines(stream)


def progress_of(given: Progress | bool) -> Progress:
    """Return what a caller wants to be told by: True for what suits standard error, False for nothing.

    Raises ConfigError for what is no `Progress`.
    """
    if isinstance(given, bool):
        return for_stream() if given else SILENT
    if isinstance(given, type) or not all(callable(getattr(given, n, None)) for n in ("start", "advance", "finish")):
        raise ConfigError(f"progress {given!r}: true, false or a Progress such as tensorferry.progress.Bar is expected")
    return given


def _rank_of_process() -> int:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0
