"""What the machine can do at best with the bytes that a work needs: the limits that loaders are held against.

Reads are of the ranges that a rank needs, where it takes columns of whole tensors, into a hot buffer for each thread,
unless it says fresh memory. Copies and touching are of as many bytes as the rank's part has.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.peers.contestant import Contestant
from benchmarks.peers.files import headers
from benchmarks.peers.machine import MIB, anonymous, libc
from benchmarks.peers.works import bytes_of

if TYPE_CHECKING:
    from benchmarks.peers.task import Task

_POPULATE_WRITE = 23
_PIECE, _ALIGNED, _PAGE = 8 * MIB, 4096, 4096
_CORES = len(os.sched_getaffinity(0))
_WORKS = ("full", "tp", "moe", "ep", "many")
_WHOLE = ("full", "moe", "ep", "many")  # those that need whole tensors


class _Range(NamedTuple):
    path: str
    first: int
    last: int


def _ranges(task: Task) -> list[_Range]:
    """Return which bytes of the files are needed, joined where they touch, in pieces of at most 8 MiB."""
    found: list[_Range] = []
    for path in task.files:
        start, header = headers(Path(path))
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if name not in task.parts:
                continue
            first, last = (start + at for at in entry["data_offsets"])
            part = task.parts[name]
            if part is not None and part[0] == 0:
                row = (last - first) // entry["shape"][0]
                first, last = first + part[1] * row, first + (part[1] + part[2]) * row
            if found and found[-1].path == path and found[-1].last == first:
                first = found.pop().first
            found.append(_Range(path, first, last))
    return [_Range(r.path, at, min(r.last, at + _PIECE)) for r in found for at in range(r.first, r.last, _PIECE)]


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    failed: list[BaseException] = []

    def one(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _memory(task: Task, size: int, *, touched: bool, huge: bool = False) -> int:
    kept, address = anonymous(size)
    task.kept.append(kept)
    if huge:  # a disk is told of each by one address: nothing is faster to read into
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    if touched:
        ctypes.memset(address, 1, size)
    return address


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def _read(ranges: Iterable[_Range], place: Callable[[_Range], memoryview], flags: int) -> None:
    """Read each range to where `place` says, widened to whole blocks for direct reads."""
    files: dict[str, int] = {}
    block = _ALIGNED if flags else 1
    try:
        for one in ranges:
            fd = (
                files[one.path]
                if one.path in files
                else files.setdefault(one.path, os.open(one.path, os.O_RDONLY | flags))
            )
            first, last = one.first // block * block, -(-one.last // block) * block
            view, done = place(one)[: last - first], 0
            while first + done < one.last:
                done += _some(fd, view[done:], first + done)
    finally:
        for fd in files.values():
            os.close(fd)


def _some(fd: int, view: memoryview, at: int) -> int:
    count = os.preadv(fd, [view], at)
    if not count:
        raise EOFError("the file ends early")
    return count


class _Taken:
    """An iterator that several threads may take from."""

    def __init__(self, ranges: Iterable[_Range]) -> None:
        self._lock, self._rest = threading.Lock(), iter(ranges)

    def __iter__(self) -> Iterator[_Range]:
        while True:
            with self._lock:
                one = next(self._rest, None)
            if one is None:
                return
            yield one


def _hot(threads: int, flags: int) -> tuple[Callable[[Task], None], Callable[[Task], None]]:
    """Return how reads into a buffer for each thread are prepared and done."""

    def prepare(task: Task) -> None:
        size = _PIECE + 2 * _ALIGNED
        buffers = [_memory(task, size, touched=True, huge=bool(flags)) for _ in range(threads)]
        task.kept.append((buffers, _ranges(task)))

    def load(task: Task) -> None:
        buffers, ranges = task.kept[-1]
        taken = _Taken(ranges)

        def work(number: int) -> None:
            view = _view(buffers[number], _PIECE + 2 * _ALIGNED)
            _read(taken, lambda _: view, flags)

        _in_threads(threads, work)

    return prepare, load


def _fresh(threads: int) -> tuple[Callable[[Task], None], Callable[[Task], None]]:
    """Return how reads into memory that nothing has touched are prepared and done, a stretch of it for each thread."""

    def prepare(task: Task) -> None:
        ranges = _ranges(task)
        address = _memory(task, sum(r.last - r.first for r in ranges), touched=False)
        places, at = {}, address
        for one in ranges:
            places[one] = _view(at, one.last - one.first)
            at += one.last - one.first
        task.kept.append((ranges, places))

    def load(task: Task) -> None:
        ranges, places = task.kept[-1]
        each = -(-len(ranges) // threads)
        _in_threads(threads, lambda n: _read(ranges[n * each : (n + 1) * each], places.__getitem__, 0))

    return prepare, load


def _whole(
    threads: int, move: Callable[[int, int, int], None], *, copied: bool
) -> tuple[Callable[[Task], None], Callable[[Task], None]]:
    """Return how something is done to as much memory as is needed, in equal stretches: ``move(to, from, size)``."""

    def prepare(task: Task) -> None:
        size = bytes_of(task.work, task.size)
        source = _memory(task, size, touched=True) if copied else 0
        task.kept.append((_memory(task, size, touched=copied), source, size))

    def load(task: Task) -> None:
        target, source, size = task.kept[-1]
        each = -(-size // threads // _PAGE) * _PAGE

        def work(number: int) -> None:
            first = min(number * each, size)
            move(target + first, source + first, min(size, first + each) - first)

        _in_threads(threads, work)

    return prepare, load


def _copy(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


def _touch(target: int, source: int, size: int) -> None:
    if libc.madvise(ctypes.c_void_p(target), ctypes.c_size_t(-(-size // _PAGE) * _PAGE), _POPULATE_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


def _limits() -> Iterator[Contestant]:
    for n in (1, 2, 4, 8):
        yield _limit(f"raw read, {n}", _hot(n, os.O_DIRECT), "O_DIRECT preadv into hot huge pages", "cold")
    for n in sorted({1, _CORES}):
        yield _limit(f"page-cache read, {n}", _hot(n, 0), "preadv into hot memory", "warm")
        yield _limit(
            f"page-cache read into fresh memory, {n}", _fresh(n), "preadv into untouched memory", "warm", _WHOLE
        )
        yield _limit(f"memcpy, {n}", _whole(n, _copy, copied=True), "memmove between touched memory", "warm")
        yield _limit(f"first touch, {n}", _whole(n, _touch, copied=False), "MADV_POPULATE_WRITE", "warm")


def _limit(
    name: str,
    how: tuple[Callable[[Task], None], Callable[[Task], None]],
    call: str,
    cache: str,
    works: Sequence[str] = _WORKS,
) -> Contestant:
    prepare, load = how
    return Contestant(
        f"{name} thread{'' if name.endswith(' 1') else 's'}", load, call, works, prepare=prepare, limit=True,
        caches=(cache,),
    )  # fmt: skip


CONTESTANTS = tuple(_limits())
