"""An open file of this machine: its descriptors, and reading and mapping by them. Which files may be opened, and when
they are closed, is the business of `local`."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tensorferry.errors import ReadError
from tensorferry.storage.direct import DirectFile, Filled, Spare, open_direct
from tensorferry.storage.direct import fill as fill_direct
from tensorferry.storage.file_systems import file_system_of
from tensorferry.storage.leases import Lease
from tensorferry.storage.touching import PIECE, in_touched_pieces

__all__ = ["Handle", "fill", "mapped", "place_of", "read_as_asked"]

_IOV_MAX = 1024  # buffers that one preadv takes on Linux
_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which older Pythons do not name


class Handle:
    """An open file, how many reads use it right now, its lease, and a descriptor for direct reads once one was asked
    for."""

    __slots__ = ("_direct", "_far", "_lock", "fd", "lease", "path", "users")

    def __init__(self, path: str, fd: int) -> None:
        self.path, self.fd, self.users = path, fd, 0
        self._direct: DirectFile | None = None
        self._far: bool | None = None
        self._lock = threading.Lock()
        self.lease = Lease()

    @property
    def is_elsewhere(self) -> bool:
        """Whether its bytes come from another machine, so that each request for them takes long."""
        if self._far is None:
            self._far = file_system_of(self.fd).where == "elsewhere"
        return self._far

    def direct(self) -> DirectFile:
        """Return the file as it can be read directly. Raises OSError where descriptors have run out."""
        if (known := self._direct) is not None:
            return known
        with self._lock:
            if self._direct is None:
                self._direct = open_direct(self.fd)
            return self._direct

    def read_direct(self, offset: int, views: list[memoryview], spare: Spare) -> Filled | None:
        """Fill `views` directly, as far as the file goes; None where the file system takes no such read after all."""
        direct = self.direct()
        if direct.fd < 0:
            return None
        try:
            return fill_direct(direct, offset, views, spare)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with self._lock:  # the descriptor is closed with the other one: another thread may be reading by it
                self._direct = direct._replace(why="direct reads are refused")
            return None

    def close(self) -> None:
        """Close the descriptors; idempotent."""
        fd, self.fd = self.fd, -1
        direct, self._direct = self._direct, None
        for each in (fd, -1 if direct is None else direct.fd):
            if each >= 0:
                os.close(each)

    def __del__(self) -> None:
        # An interrupt may come before whoever opens a storage has it to close. Numbers of descriptors are used again,
        # so that a handle is closed but once.
        if getattr(self, "fd", -1) >= 0:
            self.close()


def fill(fd: int, label: str, offset: int, views: list[memoryview], *, touch: bool) -> int:
    """Fill `views` as far as the file goes; return how many bytes that was. Raises ReadError.

    touch: give memory that nobody has used its pages before; see `in_touched_pieces`.
    """
    if not touch:
        return _fill(fd, label, offset, views)
    done = 0
    for group in _groups(views):
        wanted = sum(map(len, group))
        got = _fill(fd, label, offset + done, group)
        done += got
        if got < wanted:
            break
    return done


def _groups(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the views that one call fills: large ones in memory that nobody has touched are filled piece by piece."""
    group: list[memoryview] = []
    for view in views:
        if len(view) < PIECE:
            group.append(view)
            continue
        if group:
            yield group
            group = []
        for piece in in_touched_pieces(view):
            yield [piece]
    if group:
        yield group


def _fill(fd: int, label: str, offset: int, views: list[memoryview]) -> int:
    done, first = 0, 0
    try:
        while first < len(views) and (got := os.preadv(fd, views[first : first + _IOV_MAX], offset + done)):
            done += got
            first = _advance(views, first, got)
    except OSError as error:
        raise ReadError(f"{label}: {error.strerror}, while reading at offset {offset + done}") from None
    return done


def _advance(views: list[memoryview], first: int, got: int) -> int:
    """Take `got` bytes off the front of `views` from `first` on; return the first that is not full."""
    while got:
        if got < len(views[first]):
            views[first] = views[first][got:]
            return first
        got -= len(views[first])
        first += 1
    return first


def mapped(fd: int, *, writable: bool = False) -> memoryview:
    """Map a file privately. What is written to a `writable` mapping stays in this process, page by page."""
    if not os.fstat(fd).st_size:
        return memoryview(b"")  # an empty file cannot be mapped
    if not writable:
        return memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    # No memory is set aside for copies that nobody makes, or a model larger than the memory could not be mapped.
    flags = mmap.MAP_PRIVATE | (_NORESERVE if hasattr(os, "O_DIRECT") else 0)
    return memoryview(mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def read_as_asked(fd: int) -> None:
    """Ask the kernel to bring the pages of a read and no more: what is wanted next is known and asked for here."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def place_of(fd: int) -> str | None:
    """Return the real path of an open file, where the system tells it."""
    try:
        place = str(Path("/proc/self/fd", str(fd)).readlink())
    except OSError:
        return None
    return place.removesuffix(" (deleted)") if place.startswith("/") else None
