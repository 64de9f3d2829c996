"""What vLLM's log says of a load: one line for each rank, progress on the first of them, and every warning."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from tensorferry.core.amounts import counted, few, human_bytes
from tensorferry.core.names import fold
from tensorferry.errors import shown
from tensorferry.progress import Lines, Progress
from tensorferry.report import Report, by_reason

__all__ = ["line_of", "progress_in", "tell", "warnings_in"]


def tell(log: logging.Logger, report: Report, size: int) -> None:
    """Write the report of a load to `log`. size: bytes of the whole checkpoint."""
    log.info("%s", line_of(report, size))
    for why, names in by_reason(report.streamed).items():
        log.warning("streamed through the model's own loader (%s): %s", why, _few(names))
    if report.unexpected:
        log.warning("not used by the model: %s", _few(report.unexpected))
    log.debug("%s", report)


def line_of(report: Report, size: int) -> str:
    """Return what a load was, in one line."""
    read = f"read {human_bytes(report.bytes_read)} of {human_bytes(size)}"
    phases = ", ".join(f"{phase} {s:.2f} s" for phase, s in report.seconds.items() if s >= 0.005)
    parts = [
        f"tensorferry: {counted(report.parameters, 'parameter')} from {shown(report.source, 300)} ({report.format})",
        f"{read} in {counted(report.reads, 'read')}",
        *([f"{counted(len(report.streamed), 'tensor')} streamed"] if report.streamed else []),
        *([f"{counted(len(report.computed), 'tensor')} left as built"] if report.computed else []),
        *([phases] if phases else []),
    ]
    return "; ".join(parts)


def progress_in(log: logging.Logger) -> Progress:
    """Return what tells of a load in `log`, about every ten seconds."""
    return Lines(cast("TextIO", _InLog(log)))


@contextmanager
def warnings_in(log: logging.Logger) -> Iterator[None]:
    """Have what we warn of while this lasts written to `log`, and nowhere else."""
    ours, handler = logging.getLogger("tensorferry"), _PassedOn(log)
    propagated, ours.propagate = ours.propagate, False
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.propagate = propagated


class _PassedOn(logging.Handler):
    """Gives warnings to another logger."""

    def __init__(self, log: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.log(record.levelno, "%s", record.getMessage())


class _InLog(io.TextIOBase):
    """A text stream whose lines are entries of a log."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def write(self, text: str, /) -> int:
        if text.strip():
            self._log.info("tensorferry: %s", text.strip())
        return len(text)


def _few(names: object) -> str:
    assert isinstance(names, tuple | list)
    return few([f.text for f in fold(names)], 6)
