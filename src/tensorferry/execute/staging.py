"""Memory that bytes pass through: a few blocks, mapped for the purpose and used again and again.

An allocator would keep freed blocks in its arenas, beyond any bound, and have the kernel clear each new one.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Staging"]


class Staging:
    """Lends blocks of bytes to threads. Blocks of up to `block` bytes are kept for the next; larger ones are not."""

    def __init__(self, block: int) -> None:
        self._block = max(block, mmap.PAGESIZE)
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._lent = 0
        self.peak = 0

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Lend `nbytes` uninitialized bytes (uint8, page-aligned); they must not be used after the block ends."""
        if not nbytes:
            yield torch.empty(0, dtype=torch.uint8)
            return
        kept = nbytes <= self._block
        with self._lock:
            self._lent += nbytes
            self.peak = max(self.peak, self._lent)
            block = self._free.pop() if kept and self._free else None
        try:
            if block is None:
                block = torch.frombuffer(mmap.mmap(-1, self._block if kept else nbytes), dtype=torch.uint8)
            yield block[:nbytes]
        finally:
            with self._lock:
                self._lent -= nbytes
                if kept and block is not None:
                    self._free.append(block)
