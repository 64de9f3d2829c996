"""Reading from any storage, whatever it can do beyond the least. What storages are is in `base`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensorferry.storage.base import Storage, StorageKind, SupportsKind, SupportsRuns, SupportsScatter

__all__ = ["ReadInto", "kind_of", "read_bytes", "read_runs", "scatter"]

ReadInto = Callable[[str, int, memoryview], None]
"""Fills the view exactly from an offset of a path, or raises; `Storage.read_into` is one."""


def kind_of(storage: Storage, path: str) -> StorageKind:
    """Return the kind of storage that a file lies on: a local one where nobody says otherwise."""
    return storage.kind(path) if isinstance(storage, SupportsKind) else "local"


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
