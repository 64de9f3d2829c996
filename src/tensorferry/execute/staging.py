"""Memory that bytes pass through: a few blocks, mapped for the purpose and used again and again.

An allocator would keep freed blocks in its arenas, beyond any bound, and have the kernel clear each new one.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tensorferry.storage.blocks import block_of

__all__ = ["Staging", "anonymous"]


def anonymous(nbytes: int) -> torch.Tensor:
    """Return fresh memory (uint8, page-aligned) straight from the system, which goes back there with the tensor.

    It is on huge pages where that pays; see `block_of`.
    """
    return torch.frombuffer(block_of(nbytes), dtype=torch.uint8)


class Staging:
    """Lends blocks of bytes to threads.

    Blocks of up to `block` bytes are kept for the next borrower, as many as `bound` bytes hold; larger ones are
    unmapped when they come back. `peak` is the most that was lent at once, with the room that borrowers take for
    themselves.
    """

    def __init__(self, block: int, bound: int) -> None:
        self._block = max(block, mmap.PAGESIZE)
        self._to_make = max(1, bound // self._block)
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._lent = 0
        self.peak = 0

    @contextmanager
    def lend(self, nbytes: int, *, room: int = 0) -> Iterator[torch.Tensor]:
        """Lend `nbytes` uninitialized bytes (uint8, page-aligned); they must not be used after the block ends.

        room: bytes that the borrower allocates elsewhere meanwhile; they count towards the peak.
        """
        self._note(room)
        try:
            if nbytes:
                with self._lent_block(nbytes) as block:
                    yield block
            else:
                yield torch.empty(0, dtype=torch.uint8, device="cpu")
        finally:
            self._note(-room)

    @contextmanager
    def _lent_block(self, nbytes: int) -> Iterator[torch.Tensor]:
        block, keep = self._borrow(nbytes)
        try:
            if block is None:
                block = anonymous(self._block if keep else nbytes)
            yield block[:nbytes]
        finally:
            self._give_back(nbytes, block if keep else None)

    def _note(self, room: int) -> None:
        with self._lock:
            self._lent += room
            self.peak = max(self.peak, self._lent)

    def _borrow(self, nbytes: int) -> tuple[torch.Tensor | None, bool]:
        """Return a block that is there, or None where one is to be mapped, and whether to keep it for the next."""
        with self._lock:
            self._lent += nbytes
            self.peak = max(self.peak, self._lent)
            if nbytes > self._block:
                return None, False
            if self._free:
                return self._free.pop(), True
            self._to_make -= 1
            return None, self._to_make >= 0

    def _give_back(self, nbytes: int, kept: torch.Tensor | None) -> None:
        with self._lock:
            self._lent -= nbytes
            if kept is not None:
                self._free.append(kept)
