"""Telling how far a load is, in bytes: a bar on a terminal, a few plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol, TextIO

from tensorferry.core.explain import human_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["SILENT", "Bar", "Lines", "Progress", "Silent", "for_stream"]


class Progress(Protocol):
    """Is told of a load in bytes. `advance` may be called from several threads."""

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
    """Writes an ASCII line when a tenth of the bytes have come, but not more than one in `seconds`, and one at the end.

    For logs and pipes: no carriage returns, at most twelve lines for a load of any size.
    """

    def __init__(self, stream: TextIO, *, seconds: float = 10.0) -> None:
        self._stream, self._seconds = stream, seconds
        self._lock = threading.Lock()
        self._total = self._done = self._tenths = 0
        self._what = ""
        self._began = self._said = 0.0
        self._open = False

    def start(self, total: int, what: str) -> None:
        self._total, self._done, self._tenths, self._what = total, 0, 0, what
        self._began = self._said = time.monotonic()
        self._open = True

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            tenths, now = self._done * 10 // max(self._total, 1), time.monotonic()
            if tenths > self._tenths and tenths < 10 and now - self._said >= self._seconds:
                self._tenths, self._said = tenths, now
                self._say()

    def finish(self) -> None:
        if self._open:
            self._open = False
            self._say()

    def _say(self) -> None:
        seconds = time.monotonic() - self._began
        share = 100 * self._done // max(self._total, 1)
        done, total = human_bytes(self._done), human_bytes(self._total)
        self._stream.write(f"{self._what}: {share}% ({done} of {total}) after {seconds:.1f} s\n")
        self._stream.flush()


class Bar:
    """Draws a bar on a terminal, on standard error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def start(self, total: int, what: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        console = Console(file=self._stream)
        self._bar = RichProgress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task(what, total=total)
        self._bar.start()

    def advance(self, nbytes: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, nbytes)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def for_stream(stream: TextIO | None = None, *, rank: int = 0) -> Progress:
    """Return what suits `stream` (default: standard error): a bar on a terminal, lines elsewhere.

    Of several ranks only rank 0 tells anything.
    """
    if rank != 0:
        return SILENT
    stream = stream or sys.stderr
    return Bar(stream) if stream.isatty() else Lines(stream)
