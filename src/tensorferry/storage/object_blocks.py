"""Bytes of objects that were read ahead of who asks for them, as headers are read: a few, for a short while."""

from __future__ import annotations

import queue
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from tensorferry.waiting import joined, started

__all__ = ["AHEAD", "Block", "Blocks", "fetched", "together"]

AHEAD, MOST_AHEAD = 128 << 10, 1 << 20
"""Bytes that are read ahead: most headers have fewer. Twice as many each time, up to the latter, where a read goes on
at the last."""
_OBJECTS = 64
"""Objects of which such bytes are kept."""
_GAP = 256 << 10
"""Bytes between two short ranges up to which they are read as one: an eighth of what come in the time of a request."""
_LONGEST = 8 << 20
"""Bytes of such a read at most."""
_MOST = 64 << 20
"""Bytes of short ranges that are brought at once; those behind them are read when they are asked for."""


class Block(NamedTuple):
    """Bytes of an object from `start` on."""

    start: int
    data: bytes

    def part(self, offset: int, length: int) -> memoryview | None:
        """Return a range, where all of it is here."""
        at = offset - self.start
        return memoryview(self.data)[at : at + length] if at >= 0 and at + length <= len(self.data) else None


class Blocks:
    """The last bytes of each object that were read ahead, and short ranges that were brought. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: OrderedDict[str, Block] = OrderedDict()
        self._brought: OrderedDict[str, list[Block]] = OrderedDict()

    def find(self, path: str, offset: int, length: int) -> memoryview | None:
        """Return a range, if all of it is here."""
        with self._lock:
            last, brought = self._last.get(path), self._brought.get(path, [])
            at = bisect_right(brought, offset, key=lambda block: block.start) - 1
            near = [block for block in (last, brought[at] if at >= 0 else None) if block is not None]
        return next((part for block in near if (part := block.part(offset, length)) is not None), None)

    def ahead(self, path: str, offset: int) -> int:
        """Return how many bytes to read where a short read begins at `offset`: more where it goes on at the last."""
        with self._lock:
            last = self._last.get(path)
        if last is None or not last.start < offset <= last.start + len(last.data):
            return AHEAD
        return min(2 * len(last.data), MOST_AHEAD)

    def keep(self, path: str, block: Block) -> None:
        """Keep the last block of an object, in place of the one before."""
        with self._lock:
            _put(self._last, path, block)

    def bring(self, path: str, blocks: Iterable[Block]) -> None:
        """Keep blocks of an object, in place of those that were brought before."""
        with self._lock:
            _put(self._brought, path, sorted(blocks, key=lambda block: block.start))

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._last.clear()
            self._brought.clear()


def _put(kept: OrderedDict[str, Block] | OrderedDict[str, list[Block]], path: str, what: Block | list[Block]) -> None:
    kept[path] = what  # type: ignore[assignment]
    kept.move_to_end(path)
    while len(kept) > _OBJECTS:
        kept.popitem(last=False)


def together(ranges: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of what brings all of `ranges`, those near each other as one; none is beyond `size`.

    >>> list(together([(900_000, 100), (0, 50), (60, 10)], 900_050))
    [(0, 70), (900000, 50)]
    """
    begin = end = total = 0
    for offset, length in sorted(ranges):
        start, stop = max(offset, 0), min(offset + length, size)
        if start >= stop:
            continue
        if end and (start - end > _GAP or stop - begin > _LONGEST):
            yield begin, end - begin
            total += end - begin
            begin = start
        elif not end:
            begin = start
        end = max(end, stop)
        if total + end - begin > _MOST:
            return
    if end:
        yield begin, end - begin


def fetched(read: Callable[[int, int], bytes], ranges: Sequence[tuple[int, int]], threads: int) -> list[Block]:
    """Return the blocks that ``read(offset, length)`` gives, by several threads; without those that cannot be read.

    Whoever asks for one of these reads it, and meets the fault.
    """
    waiting: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for one in ranges:
        waiting.put(one)
    found: list[Block] = []

    def run() -> None:
        with suppress(queue.Empty):
            while True:
                offset, length = waiting.get_nowait()
                with suppress(OSError, ValueError):
                    found.append(Block(offset, read(offset, length)))

    running = [threading.Thread(target=run, name="tensorferry-ranges", daemon=True) for _ in range(threads)]
    for thread in running[: len(ranges)]:
        started(thread)
    for thread in running[: len(ranges)]:
        joined(thread)
    return list(found)
