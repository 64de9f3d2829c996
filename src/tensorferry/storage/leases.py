"""Bytes of a file as they lie in the page cache, for as long as nobody may cut the file: a mapping under a lease.

Who touches a page of a mapping that is no longer in its file is killed. A lease (``fcntl(2)``, Linux) has whoever wants
to write to the file, or to cut it, wait until it is given back.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tensorferry.storage.base import LeasedFile
from tensorferry.storage.folder import identity_of
from tensorferry.storage.page_cache import is_cached
from tensorferry.storage.pages import Pages, can_borrow

__all__ = ["Lease", "leased", "lent"]


class Lease:
    """A lease on an open file, held as long as one thread or more copies from it.

    It is had by who owns the file, or may lease any, while nobody has it open for writing. From when somebody waits
    for it nobody gets it any more, so that it is given back as soon as the copies end that have begun.
    """

    __slots__ = ("_lock", "_users")

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()

    def take(self, fd: int) -> bool:
        """Return whether the file of `fd` is leased until `give_back`."""
        with self._lock, suppress(OSError):
            if self._users and not self.is_held(fd):
                return False
            if not self._users:
                _lease(fd)
            self._users += 1
            return True
        return False

    def is_held(self, fd: int) -> bool:
        """Whether the lease has been held from when it was taken until now, and nobody waits for it."""
        with suppress(OSError):
            return fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK
        return False

    def give_back(self, fd: int) -> None:
        """End what `take` began."""
        with self._lock:
            self._users -= 1
            if not self._users:
                with suppress(OSError):  # it was taken from us, as we were stopped for longer than others have to wait
                    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


@contextmanager
def leased(fd: int, lease: Lease) -> Iterator[LeasedFile | None]:
    """Lease a file for the time of the block; see `SupportsLeasedFiles`."""
    if not hasattr(fcntl, "F_SETLEASE") or not lease.take(fd):
        yield None
        return
    try:
        before = os.fstat(fd)
        yield LeasedFile(fd, before.st_size, lambda: lease.is_held(fd) or _state(os.fstat(fd)) == _state(before))
    finally:
        lease.give_back(fd)


def _lease(fd: int) -> None:
    """Take a lease. Raises OSError where there is none to be had.

    Who holds a lease is told by a signal that somebody waits. We ask, so nobody is to be told; until that is said, the
    signal is one that does nothing by itself, where the usual one would end the process.
    """
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    fcntl.fcntl(fd, fcntl.F_SETOWN, 0)


@contextmanager
def lent(fd: int, lease: Lease, offset: int, length: int) -> Iterator[memoryview | None]:
    """Lend a range of a file as bytes, which are to be read within the block only. None where that is not possible.

    It has to be in the page cache as a whole: what is not there is read faster otherwise, and an error of a disk would
    end the process.
    """
    asked = length > 0 and hasattr(fcntl, "F_SETLEASE") and is_cached(fd, offset, length)
    if not asked or not lease.take(fd):
        yield None
        return
    try:
        yield _mapped(fd, offset, length)
    finally:
        lease.give_back(fd)


def _mapped(fd: int, offset: int, length: int) -> memoryview | None:
    """Map a range, with all of its pages; None where it is not in the file, or something speaks against it.

    The pages go with the last view, so that what an error keeps does no harm. Writing to them would reach nobody.
    """
    if not can_borrow() or offset + length > os.fstat(fd).st_size:
        return None
    try:
        pages = Pages(offset, length)
        pages.borrow(fd, offset - pages.lead, 0, pages.size)
    except MemoryError:
        return None
    return memoryview(pages.take())[pages.lead : pages.lead + length] if pages.bring(0, pages.size) else None


def _state(info: os.stat_result) -> object:
    """Return what is another whenever a file has been written to, whatever is said of its times afterwards."""
    return identity_of(info), info.st_ctime_ns
