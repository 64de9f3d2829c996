"""Memory whose pages are those of files, as they lie in the page cache, until it is told to have pages of its own.

What a file has just as it is wanted is then neither read into memory nor copied there. Linux.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress

from tensorferry.storage.libc import address, libc
from tensorferry.storage.touching import knows_populate

__all__ = ["PAGE", "Pages", "can_borrow"]

PAGE = mmap.PAGESIZE
_FIXED, _NORESERVE = 0x10, 0x4000  # MAP_FIXED and MAP_NORESERVE of Linux, which older Pythons do not name
_POPULATE_READ = 22  # MADV_POPULATE_READ, likewise
_TO_FIXED = 3  # MREMAP_MAYMOVE and MREMAP_FIXED
_OWNED_AT_ONCE = 64 << 20
"""Bytes that are copied by one call: so much more memory is needed meanwhile, and so long an interrupt waits."""


class Pages:
    """`nbytes` of memory whose address equals `begin` modulo a page, with no pages of its own until it is written to.

    A process that is forked while something is borrowed has the pages of the files for good.

    `take` hands it over: it lives as long as what is made of it. Positions count from the page that it begins in; they
    and lengths are whole pages. Raises MemoryError where the system has no room for it.
    """

    __slots__ = ("_at", "_borrowed", "_kept", "_taken", "lead", "size")

    def __init__(self, begin: int, nbytes: int) -> None:
        self.lead = begin % PAGE
        self.size = -(-(self.lead + nbytes) // PAGE) * PAGE
        # A mapping of Python's is let go of in C, which no interrupt comes into, and all that is mapped into it.
        self._kept: mmap.mmap | None = _anonymous(self.size)
        self._at = address(memoryview(self._kept))
        self._taken = weakref.ref(self._kept)
        self._borrowed: list[tuple[int, int]] = []

    def take(self) -> mmap.mmap:
        """Return the memory, all of its pages; it is not kept here, and can be taken once."""
        memory, self._kept = self._kept, None
        assert memory is not None
        return memory

    @property
    def is_in_use(self) -> bool:
        """Whether something that was made of the memory is alive."""
        return self._taken() is not None

    @property
    def borrowed(self) -> int:
        """Bytes of pages that are those of files."""
        return sum(length for _, length in self._borrowed)

    def is_at(self, address: int) -> bool:
        """Whether the byte at `address` is one of these."""
        return self._at <= address < self._at + self.size

    def borrow(self, fd: int, offset: int, at: int, length: int) -> None:
        """Have pages be those of a file from `offset` on. Nothing is read before it is used, or `bring` is called.

        What is written to them stays in this process. Raises MemoryError where a process may have no more mappings.
        """
        _map(self._at + at, length, _FIXED, fd, offset)
        self._borrowed.append((at, length))

    def bring(self, at: int, length: int) -> bool:
        """Have the pages of a range be there; False where that fails: the file was cut, or memory or a disk failed."""
        return not libc().madvise(self._at + at, length, _POPULATE_READ)

    def own(self) -> bool:
        """Copy what is borrowed, in place: who uses the memory notices nothing, if nobody writes to it meanwhile.

        False as with `bring`, or where there is no room. Where nobody uses it any more, nothing is copied. (A page that
        is copied as somebody writes to it is still one of the file: it goes when that is cut.)
        """
        memory = self._taken()  # it stays meanwhile
        while self._borrowed and memory is not None:
            at, length = self._borrowed[-1]
            part = min(length, _OWNED_AT_ONCE)
            if not self._own(at + length - part, part):
                return False
            self._borrowed[-1:] = [(at, length - part)] if part < length else []
        self._borrowed.clear()
        return True

    def _own(self, at: int, length: int) -> bool:
        """Put a copy of the pages of a range in their place."""
        if not self.bring(at, length):
            return False
        try:
            copy = _map(None, length, mmap.MAP_ANONYMOUS, -1, 0)
        except MemoryError:
            return False
        ctypes.memmove(copy, self._at + at, length)
        moved: int = libc().mremap(copy, length, length, _TO_FIXED, self._at + at)
        if moved != self._at + at:
            libc().munmap(copy, length)
        return moved == self._at + at

    def drop(self) -> None:
        """Have zeros in place of what is borrowed: its values are given up. What cannot be, for want of room, stays."""
        memory = self._taken()
        for at, length in self._borrowed if memory is not None else ():
            with suppress(MemoryError):
                _map(self._at + at, length, _FIXED | mmap.MAP_ANONYMOUS, -1, 0)
        self._borrowed.clear()


def can_borrow() -> bool:
    """Whether this system can do what `Pages` does, which Linux can since 5.14."""
    return libc("mmap", "munmap", "madvise", "mremap") is not None and knows_populate()


def _anonymous(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, OverflowError):
        raise MemoryError(f"{size:,} bytes could not be mapped") from None


def _map(at: int | None, length: int, flags: int, fd: int, offset: int) -> int:
    how = mmap.MAP_PRIVATE | _NORESERVE | flags
    found = libc().mmap(at, length, mmap.PROT_READ | mmap.PROT_WRITE, how, fd, offset)
    if found in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"{length:,} bytes could not be mapped")
    return int(found)
