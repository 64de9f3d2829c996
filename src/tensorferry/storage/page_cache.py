"""What the system's page cache holds of an open file, and how to have it let go of pages. Linux; elsewhere unknown."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from itertools import groupby

from tensorferry.storage.libc import libc

__all__ = ["absent_ranges", "cached_share", "forget", "is_cached"]

_CACHESTAT = 451  # the number of the call, the same on all machines
_LOOKS, _WINDOW = 8, 64 << 10
_SHORT = 32 << 20  # bytes of which all pages are counted: one call takes no longer than several
_STEP = 64 << 20  # bytes of a file that are looked at through one mapping


def cached_share(fd: int, offset: int, length: int) -> float:
    """Return which share of a range is in the page cache, from 0.0 to 1.0; of a long one about, from a few places.

    Microseconds, and nothing is read for it, but where ``cachestat(2)`` is absent or not allowed a page here and there.
    0.0 where the system does not tell.
    """
    if length <= _SHORT and (pages := _cached_pages(fd, offset, length)) is not None:
        return min(pages / max(_pages_of(offset, length), 1), 1.0)
    window = min(_WINDOW, max(length // _LOOKS, 1))
    places = [offset + n * max(length - window, 0) // (_LOOKS - 1) for n in range(_LOOKS)]
    shares = [_share_of_window(fd, place, window) for place in places]
    return sum(shares) / len(shares)


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Return whether all of a range is in the page cache; of a system without ``cachestat(2)``, about all of it."""
    pages = _cached_pages(fd, offset, length)
    return cached_share(fd, offset, length) == 1.0 if pages is None else pages >= _pages_of(offset, length)


def absent_ranges(fd: int, offset: int, length: int) -> list[tuple[int, int]] | None:
    """Return (offset, length) of the whole pages in a range that are not in the page cache.

    None where the system does not tell: it tells owners of the file, and those who may write to it, on Linux.
    """
    first = offset - offset % mmap.PAGESIZE
    last = min(-(-(offset + length) // mmap.PAGESIZE) * mmap.PAGESIZE, _pages(os.fstat(fd).st_size))
    if not _may_look(fd) or libc("mincore") is None:
        return None
    return [run for at in range(first, last, _STEP) for run in _absent(fd, at, min(_STEP, last - at))]


def forget(fd: int, offset: int, length: int) -> None:
    """Have the page cache let go of the pages that lie in a range as a whole, where they are not in use or written."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def _share_of_window(fd: int, offset: int, length: int) -> float:
    """Return the share of a short range that is cached; of a system without cachestat, of its first byte."""
    pages = _cached_pages(fd, offset, length)
    if pages is not None:
        return min(pages / _pages_of(offset, length), 1.0)
    try:
        return float(os.preadv(fd, [bytearray(1)], offset, getattr(os, "RWF_NOWAIT", 0)) if _knows_nowait() else 0)
    except OSError:
        return 0.0


def _cached_pages(fd: int, offset: int, length: int) -> int | None:
    library = libc("syscall")
    if library is None:
        return None
    asked, told = (ctypes.c_uint64 * 2)(offset, length), (ctypes.c_uint64 * 5)()
    failed: int = library.syscall(
        ctypes.c_long(_CACHESTAT), ctypes.c_int(fd), ctypes.byref(asked), ctypes.byref(told), ctypes.c_uint(0)
    )
    return None if failed else told[0]


def _knows_nowait() -> bool:
    return hasattr(os, "RWF_NOWAIT")


def _may_look(fd: int) -> bool:
    """Whether mincore tells the truth: to others than these it says that all pages are there."""
    return os.geteuid() in (0, os.fstat(fd).st_uid) or os.access(f"/proc/self/fd/{fd}", os.W_OK)


def _absent(fd: int, offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of absent pages of a range that begins and ends between pages, within the file."""
    library = libc("mincore")
    there = bytearray(length // mmap.PAGESIZE)
    at = library.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if at in (None, ctypes.c_void_p(-1).value):
        return  # no memory for it: what we do not know to be ours stays
    failed = library.mincore(at, length, (ctypes.c_char * len(there)).from_buffer(there))
    library.munmap(at, length)
    for cached, pages in groupby(range(len(there)), key=lambda n: failed or there[n] & 1):
        if not cached:
            run = list(pages)
            yield offset + run[0] * mmap.PAGESIZE, len(run) * mmap.PAGESIZE


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _pages_of(offset: int, length: int) -> int:
    return (offset + length - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
