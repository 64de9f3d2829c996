"""Telling how far a load is: the protocol and the silent implementation; the ones that write are added here."""

from __future__ import annotations

from typing import Protocol

__all__ = ["SILENT", "Progress", "Silent"]


class Progress(Protocol):
    """Is told of a load in bytes. Methods come from one thread at a time."""

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
