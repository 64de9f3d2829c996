"""Many short ranges of an open file at equal distances, such as some columns of a matrix. Knows no tensors."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["fill_runs"]

_WINDOW = 256
"""Runs announced to the kernel at once: enough to keep a disk busy, little beside the page cache."""


def fill_runs(fd: int, offset: int, stride: int, run: int, out: memoryview) -> int:
    """Fill `out` with runs of `run` bytes, one every `stride` bytes from `offset` on; return how many bytes came.

    Fewer came than `out` holds where the file ends early. The runs of a file that is not in memory are announced
    ahead, so that the disk has many of them to do at a time and nobody waits for each. Raises OSError.
    """
    count = len(out) // run
    _announce(fd, offset, stride, run, min(_WINDOW, count))
    for first in range(0, count, _WINDOW):
        last = min(first + _WINDOW, count)
        _announce(fd, offset + last * stride, stride, run, min(_WINDOW, count - last))
        for i in range(first, last):
            got = _fill(fd, offset + i * stride, out[i * run : (i + 1) * run])
            if got < run:
                return i * run + got
    return len(out)


def _announce(fd: int, offset: int, stride: int, run: int, count: int) -> None:
    """Have the kernel begin to read runs, unless the first of them is in memory: then announcing would only cost."""
    if not count or not hasattr(os, "posix_fadvise") or _is_cached(fd, offset, run):
        return
    with suppress(OSError):
        for at in range(offset, offset + count * stride, stride):
            os.posix_fadvise(fd, at, run, os.POSIX_FADV_WILLNEED)


def _is_cached(fd: int, offset: int, run: int) -> bool:
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return os.preadv(fd, [bytearray(run)], offset, os.RWF_NOWAIT) == run
    except OSError:
        return False


def _fill(fd: int, offset: int, out: memoryview) -> int:
    done = os.preadv(fd, [out], offset)
    while 0 < done < len(out) and (got := os.preadv(fd, [out[done:]], offset + done)):
        done += got
    return done
