"""Memory that bytes are read into to be copied on: mapped for the purpose, used again and again, on huge pages."""

from __future__ import annotations

import mmap
from contextlib import suppress

from tensorferry.storage.libc import address

__all__ = ["HUGE", "block_of"]

HUGE = 2 << 20
"""Bytes of a huge page, where they have the size that most systems give them."""


def block_of(nbytes: int) -> memoryview:
    """Return fresh private memory on a page of its own, which goes back to the system with the last view of it.

    It lies on huge pages, if the system has any to give, but for an end that would not fill one. A direct read hands
    each page of its memory to the disk, and disks take so many in one request: with pages of 4 KiB, a virtual one was
    half as fast.
    """
    whole = nbytes // HUGE * HUGE
    memory = _mapped(nbytes + HUGE - mmap.PAGESIZE if whole else nbytes)
    lead = -address(memoryview(memory)) % HUGE if whole else 0
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, lead, whole)
    return memoryview(memory)[lead : lead + nbytes]


def _mapped(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
