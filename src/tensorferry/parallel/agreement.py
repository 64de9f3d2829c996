"""Ranks that do something together: all of them end it well, or all raise what the first of them met."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tensorferry import errors
from tensorferry.errors import ReadError, TensorferryError, shown
from tensorferry.parallel.groups import Ranks

__all__ = ["Agreement"]

_EVERY = 0.2
"""Seconds between two looks at whether another rank has failed."""


class _Stopped(Exception):
    """Another rank has failed, and this one has no error of its own."""


class Agreement:
    """What `ranks` do as one. Where torch.distributed is not initialized, or for a rank alone, nothing is asked.

    Every rank has to make one, and to enter the same blocks in the same order.
    """

    _made = 0

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None = None) -> None:
        self._ranks, self._group = ranks, group
        self._asks = ranks.size > 1 and dist.is_available() and dist.is_initialized()
        Agreement._made += 1
        self._key = f"tensorferry/failed/{Agreement._made}"
        self._looked = time.monotonic()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise in every rank what the block raised in the first rank in which it did; only then may ranks go on."""
        if not self._asks:
            yield
            return
        mine: BaseException | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for word of it
            mine = error
            if not isinstance(error, _Stopped):
                self._store().set(self._key, "")
        said: list[Any] = [None] * self._ranks.size
        told = None if mine is None or isinstance(mine, _Stopped) else _told(mine)
        dist.all_gather_object(said, told, group=self._group)
        for rank, found in enumerate(said):
            if found is not None:
                raise _again(rank, self._ranks.size, found) from (mine if rank == self._ranks.rank else None)

    def watch(self) -> None:
        """Leave the block at once where another rank has failed meanwhile. Cheap; to be called often."""
        now = time.monotonic()
        if self._asks and now - self._looked >= _EVERY:
            self._looked = now
            if self._store().check([self._key]):
                raise _Stopped

    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store()


def _told(error: BaseException) -> tuple[str, str, bool]:
    """Return class, words and `touched` of an error."""
    return type(error).__name__, str(error), getattr(error, "touched", False)


def _again(rank: int, ranks: int, found: tuple[str, str, bool]) -> TensorferryError:
    """Return the error of a rank for all of them: of its class, if that is one of ours."""
    name, words, touched = found
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TensorferryError):
        made = kind(f"rank {rank} of {ranks}: {words}")
    else:
        made = ReadError(f"rank {rank} of {ranks}: {name}: {shown(words, 1000)}")
    made.touched = touched
    return made
