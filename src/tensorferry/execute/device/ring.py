"""Blocks that bytes pass through on their way to a device: each is used again when the device has read it."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

from tensorferry.execute.device.streams import Event

__all__ = ["Block", "Make", "Ring", "host_memory"]


class Block(NamedTuple):
    """Bytes (uint8), and what lets go of them once no device uses them."""

    memory: torch.Tensor
    release: Callable[[], None]


Make = Callable[[int], Block]
"""Makes a block of so many bytes."""


class _Used(NamedTuple):
    """A block that came back, and the events after which it may be used again."""

    block: Block
    events: Sequence[Event]


def host_memory(pin: Callable[[torch.Tensor], Callable[[], None]]) -> Make:
    """Return what makes blocks of the CPU's memory, mapped for the purpose and pinned."""

    def make(nbytes: int) -> Block:
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        return Block(memory, pin(memory))

    return make


class Ring:
    """Lends blocks of `size` bytes to threads, as many as `bound` bytes hold, and at least one.

    A block comes back with the events after which it may be used again. The one that came back first is lent again if
    it is done with: where it is not, others hardly are, and asking costs a call of the driver. Else another is made,
    before anybody waits; who waits sleeps until the one that came back first is done with. What is larger than `size`
    gets a block of its own. `peak` is the most bytes that there were at once.
    """

    def __init__(self, make: Make, size: int, bound: int) -> None:
        self._make = make
        self._size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._to_make = max(1, bound // self._size)
        self._idle: deque[_Used] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # whoever may be interrupted takes the lock itself
        self._held = 0
        self._closed = False
        self.peak = 0

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[tuple[torch.Tensor, list[Event]]]:
        """Lend `nbytes` uninitialized bytes, with a list to which the events go that they are needed until."""
        events: list[Event] = []
        if not nbytes:
            yield torch.empty(0, dtype=torch.uint8, device="cpu"), events
            return
        own = nbytes > self._size
        block = self._made(nbytes) if own else self._taken()
        try:
            yield block.memory[:nbytes], events
        finally:
            if own or self._closed:
                self._drop(block, events)
            else:
                self._come_back(block, events)

    def close(self) -> None:
        """Wait until no device uses a block that came back, and let go of them all; of others when they come back."""
        self._closed = True
        with ExitStack() as dropping:
            for block, events in self._idle:
                dropping.callback(self._drop, block, events)
            self._idle.clear()

    def _taken(self) -> Block:
        found = self._found()
        if found is None:
            return self._made(self._size)
        block, events = found
        try:
            for event in events:
                event.synchronize()
        except BaseException:
            self._come_back(block, events)
            raise
        return block

    def _found(self) -> _Used | None:
        """Return a block that is there, with what is to be waited for, or None where one is to be made."""
        with self._lock:
            while True:
                if self._idle and all(event.query() for event in self._idle[0].events):
                    return self._idle.popleft()._replace(events=())
                if self._to_make:
                    self._to_make -= 1
                    return None
                if self._idle:
                    return self._idle.popleft()
                self._changed.wait()

    def _come_back(self, block: Block, events: Sequence[Event]) -> None:
        with self._lock:
            self._idle.append(_Used(block, events))
            self._changed.notify()

    def _made(self, nbytes: int) -> Block:
        block = self._make(nbytes)
        with self._lock:
            self._held += nbytes
            self.peak = max(self.peak, self._held)
        return block

    def _drop(self, block: Block, events: Sequence[Event]) -> None:
        try:
            for event in events:
                event.synchronize()
        finally:
            with self._lock:
                self._held -= block.memory.nbytes
            block.release()
