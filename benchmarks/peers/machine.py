"""What the kernel is asked: emptying and filling the page cache, counting, and sampling memory. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Counts", "MemorySampler", "anonymous", "cached_bytes", "counts", "described", "libc", "settle"]

MIB = 1 << 20
_CACHESTAT = 451

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mmap.restype = ctypes.c_void_p


class Counts(NamedTuple):
    """What this process has used so far: seconds of CPU, bytes that it has had fetched from a disk, and memory."""

    cpu: float
    disk: int
    major_faults: int
    anonymous: int
    peak: int


def counts() -> Counts:
    """Return the counts of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    status = memory_of(os.getpid())
    disk = next(int(line[12:]) for line in Path("/proc/self/io").read_text().splitlines() if line[:11] == "read_bytes:")
    cpu = usage.ru_utime + usage.ru_stime
    return Counts(cpu, disk, usage.ru_majflt, status["RssAnon"] + status["RssShmem"], status["VmHWM"])


def memory_of(pid: int) -> dict[str, int]:
    """Return the memory of a process in bytes, by the names of /proc/PID/status."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if words[-1:] == ["kB"]}


def reset_peak() -> None:
    """Have VmHWM begin at what is resident now, where the kernel permits."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class MemorySampler:
    """Looks at the anonymous and shared memory of another process every few milliseconds, in a thread."""

    def __init__(self, pid: int) -> None:
        self._pid, self._stop, self._samples = pid, threading.Event(), list[tuple[float, int]]()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def peak(self, began: float, ended: float) -> int:
        """Stop, and return the most that was seen between two times of the monotonic clock."""
        self._stop.set()
        self._thread.join()
        return max((size for when, size in self._samples if began <= when <= ended), default=0)

    def _sample(self) -> None:
        while not self._stop.wait(0.01):
            try:
                found = memory_of(self._pid)
            except OSError:
                return
            if "RssAnon" in found:
                self._samples.append((time.monotonic(), found["RssAnon"] + found["RssShmem"]))


def cached_bytes(path: str) -> int:
    """Return how many bytes of a file are in the page cache: by cachestat(2), or by mincore(2) on older kernels."""
    fd = os.open(path, os.O_RDONLY)
    try:
        whole, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
        if libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_int(fd), whole, found, ctypes.c_uint(0)) == 0:
            return int(found[0]) * mmap.PAGESIZE
        return _by_mincore(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _by_mincore(fd: int, size: int) -> int:
    if not size:
        return 0
    address = libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    try:
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(byte & 1 for byte in pages.raw) * mmap.PAGESIZE


def settle(files: Sequence[str], cache: str, *, drop: bool = False) -> None:
    """Take `files` out of the page cache ("cold"), or bring them there ("warm"), and make sure of it.

    drop: empty the page cache of the whole machine as well. Raises RuntimeError where neighbours do not let it be so.
    """
    size = sum(map(os.path.getsize, files))
    for _ in range(4):
        if cache == "cold":
            _empty(files, drop)
        else:
            _fill(files)
        cached = sum(map(cached_bytes, files))
        if cached <= max(MIB, size // 100) if cache == "cold" else cached >= size - size // 100:
            return
    raise RuntimeError(f"the page cache has {cached:,} of {size:,} bytes, which is not {cache}")


def _empty(files: Sequence[str], drop: bool) -> None:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    if drop:
        Path("/proc/sys/vm/drop_caches").write_text("1")


def _fill(files: Sequence[str]) -> None:
    buffer = bytearray(8 * MIB)
    for path in files:
        if cached_bytes(path) < Path(path).stat().st_size:
            with Path(path).open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def anonymous(size: int) -> tuple[mmap.mmap, int]:
    """Return `size` bytes of memory that nothing has touched, to be kept, and their address, at a multiple of 2 MiB."""
    kept = mmap.mmap(-1, size + 2 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(kept))
    return kept, -(-base // (2 * MIB)) * 2 * MIB


def described() -> str:
    """Return in a few words what this machine is."""
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x[:10] == "model name"), "?"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    return f"{cpu}, {cores} cores, {memory:.0f} GiB, Linux {platform.release()}"
