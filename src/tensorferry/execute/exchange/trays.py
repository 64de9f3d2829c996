"""Memory that one process writes to and others of the same machine read: a few trays of equal size."""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

__all__ = ["Trays", "nbytes_of"]

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
_PAGE = mmap.PAGESIZE


class Trays:
    """`count` trays for up to `size` bytes each, in memory that belongs to no file. It goes when nobody has it open.

    fd: to be handed to other processes, which `opened` gives the same memory. A tray has no memory before it is
    reserved, which is for one process to do.
    """

    def __init__(self, fd: int, count: int, size: int) -> None:
        self.fd, self.count, self.size = fd, count, size
        self._room = _room(size)
        self._reserved: set[int] = set()
        self._memory = torch.frombuffer(mmap.mmap(fd, count * self._room), dtype=torch.uint8)

    @classmethod
    def made(cls, count: int, size: int) -> Trays:
        """Return new ones. Raises OSError where the system has no such memory."""
        fd = os.memfd_create("tensorferry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes_of(count, size))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, count, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def opened(cls, fd: int, count: int, size: int) -> Trays:
        """Return those of another process, of which `fd` is a descriptor; it is closed here if that fails.

        Raises OSError where it is not as long as was said, or could be cut short: reading it would kill the process.
        """
        try:
            sealed, told = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS, nbytes_of(count, size)
            if not sealed or not told or os.fstat(fd).st_size != told:
                raise OSError("the memory of another rank is not what it said")
            return cls(fd, count, size)
        except BaseException:
            os.close(fd)
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of all trays."""
        return self.count * self._room

    def reserve(self, number: int) -> bool:
        """Give a tray its memory, before it is first written to, and say whether there is any.

        A page that cannot be had when it is written to would kill the process.
        """
        if number in self._reserved:
            return True
        try:
            os.posix_fallocate(self.fd, number * self._room, self._room)
        except OSError:
            return False
        self._reserved.add(number)
        return True

    def at(self, number: int, offset: int, length: int) -> torch.Tensor:
        """Return the memory (uint8) for `length` bytes that begin at `offset` of a file.

        It lies on the same address modulo a page as in the file, so that what is aligned there is aligned here.
        """
        first = number * self._room + offset % _PAGE
        return self._memory[first : first + length]

    def close(self) -> None:
        """Close the descriptor; the memory stays as long as something made from it is in use."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._memory = torch.empty(0, dtype=torch.uint8)


def nbytes_of(count: int, size: int) -> int:
    """Return the bytes of `count` trays for up to `size` bytes each."""
    return count * _room(size)


def _room(size: int) -> int:
    return -(-size // _PAGE) * _PAGE + _PAGE
