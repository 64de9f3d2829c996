"""Reading past the page cache (O_DIRECT): whether a file can be read so, whether that pays, and how it is done.

The kernel wants offsets and lengths that are multiples of the device's blocks, and addresses that are multiples of
those, too, or of as little as 4. What of a buffer lies on such an address where a block of the file begins is read
there; its ends, and all of other buffers, go through spare ones.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tensorferry.storage.blocks import HUGE, block_of
from tensorferry.storage.file_systems import file_system_of
from tensorferry.storage.libc import address, libc
from tensorferry.storage.touching import is_untouched, touch, touch_at

__all__ = ["MOST", "SPARE", "DirectFile", "Filled", "Spare", "fill", "open_direct"]

MOST = HUGE // 2
"""Bytes that are read at once, with what little lies at the ends. A virtual disk was slower by a quarter with twice
as many, wherever they went."""
SPARE = MOST - (64 << 10)
"""Bytes of a buffer that misaligned bytes go through. Not more: what is copied on should still be in a fast cache."""

_MOST_BUFFERS = 512
_LARGEST_BLOCK = 4096
_STATX_DIOALIGN, _AT_EMPTY_PATH = 0x2000, 0x1000


class DirectFile(NamedTuple):
    """A file that was opened again to be read directly.

    fd: -1 where it cannot be. block: what offsets and lengths are multiples of. memory: what addresses are multiples
    of. why: in a word or two, what speaks against it; empty where it pays on a cold file.
    """

    fd: int
    block: int
    memory: int
    why: str


class Spare:
    """Two buffers of `MOST` bytes that misaligned bytes go through, for one thread, by turns.

    A virtual disk is another processor that writes there, and waits for the cache of the one that has just copied. They
    are the halves of one huge page: to be given one took 8 ms where the host had to find its memory first.
    """

    def __init__(self) -> None:
        memory = block_of(HUGE)
        first = address(memory)
        self._now, self._next = (memory[:MOST], first), (memory[MOST:], first + MOST)

    def take(self) -> tuple[memoryview, int]:
        """Return the one that was not taken last, and its address; it begins on a page of its own."""
        self._now, self._next = self._next, self._now
        return self._now


class Filled(NamedTuple):
    """Bytes that were read into their buffers, in order, and how many of them went through a spare one."""

    nbytes: int
    copied: int


class _Run(NamedTuple):
    """Whole blocks of the file, from `start` to `stop`; into: where they go, None for a spare buffer."""

    start: int
    stop: int
    into: memoryview | None


def open_direct(fd: int) -> DirectFile:
    """Open the file of `fd` once more, for direct reads. Raises OSError only where descriptors have run out."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return DirectFile(-1, 0, 0, "no direct reads on this system")
    system = file_system_of(fd)
    told = _alignments(fd)
    if told == (0, 0):
        return DirectFile(-1, 0, 0, f"{system.name} has no direct reads")
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flag)
    except FileNotFoundError:
        return DirectFile(-1, 0, 0, "no /proc to open files again by")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return DirectFile(-1, 0, 0, f"{system.name} refuses direct reads ({error.strerror})")
    if told is None and not _can_read(again):
        os.close(again)
        return DirectFile(-1, 0, 0, f"{system.name} has no direct reads")
    block, memory = told or (_LARGEST_BLOCK, _LARGEST_BLOCK)
    return DirectFile(again, block, memory, "" if system.where == "disk" else system.name)


def fill(file: DirectFile, offset: int, views: Sequence[memoryview], spare: Spare) -> Filled:
    """Fill `views` (writable bytes) one after the other from `offset`, as far as the file goes.

    Raises OSError, with EINVAL where the file system takes no such read.
    """
    if len(views) == 1 and (filled := _filled_alone(file, offset, views[0], spare)) is not None:
        return filled
    wanted = sum(map(len, views))
    stop = offset + wanted
    straight = list(_straight(file, offset, views))
    copied, at = 0, offset
    pieces = _Pieces(views, offset)
    for group in _groups(_runs(file.block, offset, stop, straight)):
        buffer, _ = spare.take()
        end = _read(file.fd, file.block, group, buffer)
        copied += _hand_out(group, buffer, pieces, offset, min(end, stop))
        at = min(end, stop)
        if end < group[-1].stop:
            break
    return Filled(max(at - offset, 0), copied)


def _filled_alone(file: DirectFile, offset: int, view: memoryview, spare: Spare) -> Filled | None:
    """Do what `fill` does, for one buffer, as it mostly is; None where the file did not give all that was asked for."""
    first, last = -(-offset // file.block) * file.block, (offset + len(view)) // file.block * file.block
    if first < last and (address(view) + first - offset) % file.memory == 0:
        return _read_straight(file, offset, view, spare)
    return _copied_on(file, offset, view, spare)


def _read_straight(file: DirectFile, offset: int, view: memoryview, spare: Spare) -> Filled | None:
    """Fill one buffer whose blocks can be read where they belong; what is none at its ends goes through a spare one."""
    block, stop = file.block, offset + len(view)
    first, last = -(-offset // block) * block, stop // block * block
    buffer = spare.take()[0] if first > offset or last < stop else view
    at = first - block if first > offset else first
    while at < stop:
        begin = max(at, first)
        end = min(begin + SPARE, last)
        into, reach = [view[begin - offset : end - offset]], end
        if at < first:
            into.insert(0, buffer[:block])
        if end == last < stop:
            into.append(buffer[block : 2 * block])
            reach = end + block
        if at + os.preadv(file.fd, into, at) < min(reach, stop):
            return None
        at = reach
    if first > offset:
        view[: first - offset] = buffer[block - (first - offset) : block]
    if last < stop:
        view[last - offset :] = buffer[block : block + stop - last]
    return Filled(len(view), first - offset + stop - last)


def _copied_on(file: DirectFile, offset: int, view: memoryview, spare: Spare) -> Filled | None:
    """Fill one buffer of which nothing can be read where it belongs, a piece at a time, through the spare buffers.

    A few bytes that are left at the end come with the piece before: a read of their own would take as long as that.
    """
    stop, at = offset + len(view), offset // file.block * file.block
    last, is_new = -(-stop // file.block) * file.block, is_untouched(view)
    place = address(view) - offset
    while at < stop:
        end = last if last - at <= MOST else at + SPARE
        buffer, source = spare.take()
        if at + os.preadv(file.fd, [buffer[: end - at]], at) < min(end, stop):
            return None
        first, until = max(at, offset), min(end, stop)
        if is_new:
            touch_at(place + first, until - first)
        # Other than a slice, it lets other threads run.
        ctypes.memmove(place + first, source + first - at, until - first)
        at = end
    return Filled(len(view), len(view))


def _straight(file: DirectFile, offset: int, views: Sequence[memoryview]) -> Iterator[_Run]:
    """Yield the whole blocks that can be read where they belong."""
    block = file.block
    for view in views:
        first, last = -(-offset // block) * block, (offset + len(view)) // block * block
        if first < last and (address(view) + first - offset) % file.memory == 0:
            for at in range(first, last, SPARE):
                end = min(at + SPARE, last)
                yield _Run(at, end, view[at - offset : end - offset])
        offset += len(view)


def _runs(block: int, start: int, stop: int, straight: Sequence[_Run]) -> Iterator[_Run]:
    """Yield runs without a hole from `start` to `stop`, rounded to whole blocks; `SPARE` bytes at most are spared."""
    at, last = start // block * block, -(-stop // block) * block
    for run in (*straight, _Run(last, last, None)):
        for begin in range(at, run.start, SPARE):
            yield _Run(begin, min(begin + SPARE, run.start), None)
        if run.into is not None:
            yield run
        at = run.stop


def _groups(runs: Iterator[_Run]) -> Iterator[list[_Run]]:
    """Yield runs that are read with one call: those that the spare buffer has room for, and not too many bytes."""
    group: list[_Run] = []
    room = SPARE
    for run in runs:
        need = run.stop - run.start if run.into is None else 0
        if group and (need > room or len(group) == _MOST_BUFFERS or run.stop - group[0].start > MOST):
            yield group
            group, room = [], SPARE
        group.append(run)
        room -= need
    if group:
        yield group


def _read(fd: int, block: int, group: list[_Run], spare: memoryview) -> int:
    """Read the runs of a group and return up to where that went: short of their end only at the end of the file."""
    start, end = group[0].start, group[-1].stop
    at = start
    while at < end:
        got = os.preadv(fd, _left(group, spare, at), at)
        if got < block:
            return at + got
        at += got - got % block  # what came of a block that is not whole comes once more, unless the file ends there
    return at


def _left(group: list[_Run], spare: memoryview, at: int) -> list[memoryview]:
    """Return the buffers of a group from the position `at` of the file on."""
    left, used = [], 0
    for run in group:
        length = run.stop - run.start
        into = spare[used : used + length] if run.into is None else run.into
        used += length if run.into is None else 0
        if run.stop > at:
            left.append(into[max(at - run.start, 0) :])
    return left


def _hand_out(group: list[_Run], spare: memoryview, pieces: _Pieces, offset: int, end: int) -> int:
    """Copy what came into the spare buffer on to where it belongs, and return how much that was."""
    used = copied = 0
    for run in group:
        if run.into is not None:
            continue
        first, last = max(run.start, offset), min(run.stop, end)
        for into in pieces.between(first, last):
            at = used + first - run.start
            touch(into)
            _copy(into, spare[at : at + len(into)])
            first += len(into)
            copied += len(into)
        used += run.stop - run.start
    return copied


class _Pieces:
    """The buffers of a read by their positions in the file, asked for in rising order."""

    def __init__(self, views: Sequence[memoryview], offset: int) -> None:
        self._views, self._next, self._at = views, 0, offset

    def between(self, first: int, last: int) -> Iterator[memoryview]:
        """Yield the parts of buffers for the bytes from `first` to `last`."""
        while first < last:
            view = self._views[self._next]
            if first >= self._at + len(view):
                self._next += 1
                self._at += len(view)
                continue
            part = view[first - self._at : last - self._at]
            yield part
            first += len(part)


def _copy(into: memoryview, data: memoryview) -> None:
    if len(into) < _LARGEST_BLOCK:
        into[:] = data
        return
    ctypes.memmove(address(into), address(data), len(into))  # other than a slice, it lets other threads run


def _alignments(fd: int) -> tuple[int, int] | None:
    """Return what offsets and what addresses of direct reads of a file are multiples of.

    (0, 0) where it has none, None where the kernel does not say. Disks of the NVMe kind take any address that is a
    multiple of 4, so that nothing need lie in memory as it does on the disk; most others want whole blocks there, too.
    """
    library, told = libc("statx"), ctypes.create_string_buffer(256)
    if library is None or library.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, told):
        return None
    mask, memory, offset = (struct.unpack_from("=I", told, at)[0] for at in (0, 152, 156))
    if not mask & _STATX_DIOALIGN:
        return None
    return (max(offset, memory, 512), max(memory, 1)) if offset else (0, 0)


def _can_read(fd: int) -> bool:
    try:
        os.preadv(fd, [memoryview(mmap.mmap(-1, _LARGEST_BLOCK))], 0)
    except OSError:
        return False
    return True
