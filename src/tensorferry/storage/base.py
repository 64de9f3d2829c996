"""What a place that holds files can do. Implementations beside this file; nothing here does I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

__all__ = [
    "File",
    "LeasedFile",
    "Storage",
    "StorageKind",
    "SupportsBringing",
    "SupportsDevice",
    "SupportsKind",
    "SupportsLease",
    "SupportsLeasedFiles",
    "SupportsLocalPath",
    "SupportsMap",
    "SupportsNested",
    "SupportsReadAhead",
    "SupportsRuns",
    "SupportsScatter",
    "SupportsUncached",
    "SupportsVersions",
    "Uncached",
]

StorageKind = Literal["local", "network", "remote"]
"""Kinds of storage, by what reading from them costs; see `tensorferry.core.cost`."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a storage. `path` is relative to the storage, with forward slashes.

    identity: equal exactly while the contents are the same file: (device, inode, size, mtime_ns)
    locally, an ETag remotely. broken: where it points, if it is a link that leads nowhere; its size is 0 then,
    `stat` and reading raise LocateError.
    """

    path: str
    size: int
    identity: tuple[int, ...] | str
    broken: str | None = None


class Storage(Protocol):
    """A folder of files, or something like it. All methods may be called from several threads."""

    @property
    def uri(self) -> str:
        """Where it is, in words for people; never holds a credential."""
        ...

    def list(self) -> Sequence[File]:
        """Return the files directly in it, sorted by path: not recursive, no dot files."""
        ...

    def stat(self, path: str) -> File:
        """Return the file at `path`, which may lie in a sub-folder.

        Raises LocateError if it is absent or a broken link, UnsafeFile if it leads out of the storage.
        """
        ...

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Fill `out` (writable, bytes) exactly from `offset` of `path`, or raise ReadError."""
        ...

    def check_unchanged(self) -> None:
        """Raise ReadError if a file that was read is no longer the one that was opened."""
        ...

    def close(self) -> None:
        """Release handles; idempotent. Nothing can be read afterwards."""
        ...


@runtime_checkable
class SupportsMap(Storage, Protocol):
    """Storages that can map a file into memory."""

    def map(self, path: str, *, writable: bool = False) -> memoryview:
        """Return all of `path` as a view of a private mapping, read-only unless `writable`.

        What is written to a writable one stays in this process, in copies of the pages, and never reaches the file.
        The pages stay as long as the view, or anything made from it, is in use. A file that is truncated under
        a mapping kills the process and one that is rewritten changes the values, so mapping is a choice.
        """
        ...


@runtime_checkable
class SupportsScatter(Protocol):
    """Storages that fill several buffers with one read."""

    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        """Fill `outs` one after the other from one contiguous range of `path`, or raise ReadError."""
        ...


@runtime_checkable
class SupportsDevice(Protocol):
    """What reads files straight into the memory of devices, without a stop in that of the CPU."""

    def reaches(self, path: str) -> bool:
        """Whether `path` can be read so; others have to be read into memory of the CPU."""
        ...

    def read_to_device(self, path: str, offset: int, out: object) -> None:
        """Fill `out` exactly from `offset` of `path`, or raise ReadError; nothing else may use it meanwhile.

        out: contiguous bytes on a device, as anything with a ``__cuda_array_interface__``. Quickest where offset,
        length and address are whole pages.
        """
        ...


@runtime_checkable
class SupportsRuns(Protocol):
    """Storages that read many short ranges at equal distances in one go."""

    def read_runs(self, path: str, offset: int, stride: int, run: int, out: memoryview) -> None:
        """Fill `out` (writable, bytes) with runs of `run` bytes of `path`, one every `stride` bytes from `offset` on.

        `out` holds whole runs. Raises ReadError.
        """
        ...


class Uncached(NamedTuple):
    """Whether a file can be read past the page cache, and what speaks against it: nothing, where `why` is empty."""

    possible: bool
    why: str


@runtime_checkable
class SupportsUncached(Protocol):
    """Storages behind the page cache of the system, which reads can go past and which can be looked at.

    Each method raises what opening the file for a read would raise.
    """

    def uncached(self, path: str) -> Uncached:
        """Return whether `path` can be read past the page cache, and what speaks against doing so if it is cold."""
        ...

    def cached_share(self, path: str, offset: int, length: int) -> float:
        """Return about which share of a range is in the page cache, 0.0 to 1.0. A cheap look, at a few places."""
        ...

    def read_uncached(self, path: str, offset: int, outs: Sequence[memoryview]) -> int | None:
        """Fill `outs` as `SupportsScatter.read_vector` does, past the page cache, or raise ReadError.

        Returns how many bytes had to be copied once more, as they lie otherwise in memory than in the file. None
        where that is not possible: then nothing was read.
        """
        ...

    def absent_ranges(self, path: str, offset: int, length: int) -> Sequence[tuple[int, int]] | None:
        """Return (offset, length) of the pages in a range that are not in the page cache; None where nobody tells."""
        ...

    def forget(self, path: str, offset: int, length: int) -> None:
        """Have the page cache let go of the pages of a range. A hint: pages that others write to or map may stay."""
        ...


class LeasedFile(NamedTuple):
    """A file that nobody writes to or cuts meanwhile, by its descriptor and its size in bytes.

    is_same: says whether it still is what it was when it was leased, which it is not where the lease was lost.
    """

    fd: int
    size: int
    is_same: Callable[[], bool]


@runtime_checkable
class SupportsLease(Protocol):
    """Storages behind the page cache of the system that lend what is there, to be copied once instead of twice."""

    def lend(self, path: str, offset: int, length: int) -> AbstractContextManager[memoryview | None]:
        """Lend a range of `path` as it lies in the page cache, or None where it cannot be lent: then it is to be read.

        The bytes are to be read, not written to, and only within the block, which should be left soon: meanwhile
        whoever wants to write to the file, or to cut it, waits. It is lent only where they do. Raises what opening the
        file for a read would raise.
        """
        ...


@runtime_checkable
class SupportsLeasedFiles(Protocol):
    """Storages of this machine that keep others from writing to files."""

    def leased(self, path: str) -> AbstractContextManager[LeasedFile | None]:
        """Lease `path` for the time of the block, which may map its pages; None where it cannot be leased.

        Whoever wants to write to the file, or to cut it, waits until the block ends, but for no longer than the system
        has them wait (45 s as a rule): who touches a page of a mapping then that is no longer in the file is killed.
        """
        ...


@runtime_checkable
class SupportsKind(Protocol):
    """Storages that know what reading from them is like. Others are taken for local ones."""

    def kind(self, path: str) -> StorageKind:
        """Return which kind of storage the file at `path` lies on; see `tensorferry.core.cost`.

        Raises what opening the file for a read would raise.
        """
        ...


@runtime_checkable
class SupportsVersions(Protocol):
    """Storages that bind themselves to one version of a file when they first read of it."""

    def version(self, path: str) -> str:
        """Return what tells the content that is read of `path` from all others. Raises what `stat` raises."""
        ...


@runtime_checkable
class SupportsNested(Protocol):
    """Storages that can be looked into one level further down."""

    def nested(self) -> Sequence[str]:
        """Return the paths of the files in sub-folders, such as ``sub/file``: no deeper, no dot files or folders."""
        ...


@runtime_checkable
class SupportsBringing(Protocol):
    """Storages far away, from which many short ranges come sooner if they are asked for at once."""

    def bring(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Read ranges (offset, length) of `path`, some hundred bytes each, to be asked for next by `read_into`.

        A hint: what does not come, or is beyond the end, is read when it is asked for. Raises what `stat` raises.
        """
        ...


@runtime_checkable
class SupportsReadAhead(Protocol):
    """Storages that can be told of reads that are to come."""

    def read_ahead(self, path: str, offset: int, length: int) -> None:
        """Begin to bring bytes near, into a cache that is not this process's memory, without waiting for them.

        A hint: where it cannot be followed nothing happens. Raises what opening the file for a read would raise.
        """
        ...


@runtime_checkable
class SupportsLocalPath(Protocol):
    """Storages whose files others can open for themselves."""

    def local_path(self, path: str) -> str | None:
        """Return the real path of the file on this machine, absolute and free of links, or None if it is not on it.

        Raises what `stat` raises. Whoever opens it must see to it that it is still the same file afterwards.
        """
        ...
