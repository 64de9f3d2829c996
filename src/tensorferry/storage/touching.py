"""Memory that nobody has touched yet is given its pages in one go before a read. Knows no files."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from functools import cache

from tensorferry.storage.libc import address, libc

__all__ = ["PIECE", "in_touched_pieces", "is_untouched", "is_untouched_at", "knows_populate", "touch", "touch_at"]

PIECE = 1 << 20
"""Bytes that are touched and filled at a time: they are still in the processor's cache when they are filled."""

_PAYS = 128 << 10
"""Bytes from which on a look at memory and a call for its pages take less than the faults that they spare."""
_POPULATE_WRITE = 23  # Linux's MADV_POPULATE_WRITE, which Pythons do not name
_PAGE = mmap.PAGESIZE


def in_touched_pieces(view: memoryview) -> Iterator[memoryview]:
    """Yield `view`, which is writable, whole where its memory is in use; else in pieces, each with its pages touched.

    A page that a read finds missing costs a fault in the middle of copying, which takes a third longer than asking for
    many at once; asking again for pages that are there costs as much as half of copying, so one is looked at first.
    Nothing is written. Where the system knows no such call, pages come as they are written to.
    """
    if len(view) < PIECE or not is_untouched(view):
        yield view
        return
    for first in range(0, len(view), PIECE):
        piece = view[first : first + PIECE]
        _touch(piece)
        yield piece


def touch(view: memoryview) -> None:
    """Give `view` its pages, if nobody has touched its memory yet and it is long enough for that to pay."""
    if len(view) >= _PAYS and is_untouched(view):
        _touch(view)


def is_untouched(view: memoryview) -> bool:
    """Whether the page in the middle of `view` has not been given yet; that one speaks for all."""
    return is_untouched_at(address(view), len(view))


def is_untouched_at(at: int, length: int) -> bool:
    """Do what `is_untouched` does for `length` bytes at an address."""
    if not knows_populate():
        return False
    told = ctypes.c_ubyte(1)
    middle = (at + length // 2) // _PAGE * _PAGE
    return not libc().mincore(middle, _PAGE, ctypes.byref(told)) and not told.value & 1


def touch_at(at: int, length: int) -> None:
    """Do what `touch` does to `length` bytes at an address, of memory that `is_untouched`."""
    if length >= _PAYS:
        first = at // _PAGE * _PAGE
        libc().madvise(first, at + length - first, _POPULATE_WRITE)  # where that fails, reading tells


def _touch(view: memoryview) -> None:
    touch_at(address(view), len(view))


@cache
def knows_populate() -> bool:
    """Whether the kernel gives pages on demand, which Linux does since 5.14."""
    if libc() is None:
        return False
    probe = mmap.mmap(-1, _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return not libc().madvise(address(memoryview(probe)), _PAGE, _POPULATE_WRITE)
