"""Reading from any storage, whatever it can do beyond the least. What storages are is in `base`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from tensorferry.errors import AccessDenied, LocateError, ReadError
from tensorferry.storage.base import (
    File,
    Storage,
    StorageKind,
    SupportsBringing,
    SupportsKind,
    SupportsNested,
    SupportsRuns,
    SupportsScatter,
    SupportsVersions,
)

__all__ = [
    "ReadInto",
    "asked",
    "bring",
    "is_there",
    "kind_of",
    "nested",
    "read_bytes",
    "read_runs",
    "scatter",
    "seen",
    "version_of",
]

ReadInto = Callable[[str, int, memoryview], None]
"""Fills the view exactly from an offset of a path, or raises; `Storage.read_into` is one."""


def asked(
    label: Callable[[str], str], path: str, offset: int, outs: Sequence[memoryview]
) -> tuple[list[memoryview], int]:
    """Return the buffers of a read as bytes, without empty ones, and how many bytes they take.

    label: what an error calls `path`. Raises ReadError where no file has such a range.
    """
    views = [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in outs if view.nbytes]
    wanted = sum(map(len, views))
    if not 0 <= offset <= sys.maxsize - wanted:
        raise ReadError(f"{label(path)}: {wanted} bytes at offset {offset} are no part of any file")
    return views, wanted


def kind_of(storage: Storage, path: str) -> StorageKind:
    """Return the kind of storage that a file lies on: a local one where nobody says otherwise."""
    return storage.kind(path) if isinstance(storage, SupportsKind) else "local"


def version_of(storage: Storage, path: str) -> str:
    """Return what tells the content that is read of `path` from all others. Raises what `stat` raises."""
    return storage.version(path) if isinstance(storage, SupportsVersions) else str(storage.stat(path).identity)


def bring(storage: Storage, path: str, ranges: Iterable[tuple[int, int]]) -> None:
    """Have short ranges (offset, length) of `path` brought near, where that is worth the while."""
    if isinstance(storage, SupportsBringing):
        storage.bring(path, ranges)


def is_there(storage: Storage, path: str) -> bool:
    """Whether there is a file at `path`. Raises AccessDenied, and what else `stat` raises of one that is there."""
    try:
        storage.stat(path)
    except AccessDenied:
        raise
    except LocateError:
        return False
    return True


def nested(storage: Storage) -> Sequence[str]:
    """Return the paths of the files one level below; none where `storage` cannot tell, or may not."""
    try:
        return storage.nested() if isinstance(storage, SupportsNested) else ()
    except AccessDenied:
        return ()


def seen(storage: Storage, guesses: Iterable[str] = ()) -> Sequence[File]:
    """Return the files directly in `storage`; those of `guesses` that are there where it may not be listed.

    Who may not list is not told by some stores whether a file is absent or forbidden: neither is there then.
    """
    try:
        return storage.list()
    except AccessDenied:
        return [file for path in guesses if (file := _guessed(storage, path)) is not None]


def _guessed(storage: Storage, path: str) -> File | None:
    try:
        return storage.stat(path)
    except LocateError:
        return None


def read_bytes(storage: Storage, path: str, offset: int, length: int) -> bytes:
    """Return exactly `length` bytes of `path` from `offset`, or raise ReadError."""
    data = bytearray(length)
    storage.read_into(path, offset, memoryview(data))
    return bytes(data)


def scatter(storage: Storage, path: str, offset: int, outs: Sequence[memoryview]) -> None:
    """Fill `outs` one after the other from one contiguous range of `path`: with one read where `storage` can."""
    if isinstance(storage, SupportsScatter):
        storage.read_vector(path, offset, outs)
        return
    for out in outs:
        storage.read_into(path, offset, out)
        offset += out.nbytes


def read_runs(storage: Storage, path: str, offset: int, stride: int, run: int, out: memoryview) -> None:
    """Fill `out` with runs of `run` bytes, one every `stride` bytes of `path` from `offset` on, or raise ReadError."""
    if isinstance(storage, SupportsRuns):
        storage.read_runs(path, offset, stride, run, out)
        return
    for i in range(len(out) // run):
        storage.read_into(path, offset + i * stride, out[i * run : (i + 1) * run])
