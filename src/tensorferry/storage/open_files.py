"""Which files of a storage are open: each is opened once, as few at a time as was asked for, and closed when nobody
reads it any more. How a file is opened is the business of `local`."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

from tensorferry.errors import ReadError
from tensorferry.storage.handle import Handle

__all__ = ["OpenFiles"]

_T = TypeVar("_T")


class OpenFiles:
    """Files by their paths, `most` of them open at a time as a rule; the one that was not used for longest gives way.

    label: what an error calls a path. May be used from several threads.
    """

    def __init__(self, most: int, label: Callable[[str], str]) -> None:
        self._most, self._label = most, label
        self._lock = Lock()  # of what follows; held for no system call
        self._handles: OrderedDict[str, Handle] = OrderedDict()
        self._turns: dict[str, Lock] = {}
        self._closed = False

    @contextmanager
    def held(self, path: str, opened: Callable[[str], Handle]) -> Iterator[Handle]:
        """Yield the open file of `path`, which is not closed within the block. Raises ReadError after `close`.

        opened: opens it. That may take long, as on a share that hangs: those who want that file wait, and nobody else.
        """
        handle = self._used(path)
        if handle is None:
            with self.turn(path):
                handle = self._used(path) or self._newly_opened(path, opened)
        try:
            yield handle
        finally:
            self._release(handle)

    @contextmanager
    def held_if_open(self, path: str) -> Iterator[Handle | None]:
        """Do what `held` does if the file is open; else yield None."""
        with self._lock:
            handle = self._handles.get(path)
            if handle is not None:
                handle.users += 1
        try:
            yield handle
        finally:
            if handle is not None:
                self._release(handle)

    @contextmanager
    def turn(self, path: str) -> Iterator[None]:
        """Have others that open the file of `path`, or wait for this as well, wait while the block lasts."""
        with self._lock:
            lock = self._turns.setdefault(path, Lock())
        with lock:
            yield

    @property
    def has_room(self) -> bool:
        """Whether at least half of the files that may be open are not in use, and so may give way to others."""
        with self._lock:
            return 2 * sum(handle.users > 0 for handle in self._handles.values()) <= self._most

    def with_room(self, act: Callable[[], _T]) -> _T:
        """Return ``act()``, which takes a descriptor: where the process has none left, ours make room for it."""
        while True:
            try:
                return act()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._evict(len(self._handles) // 2):
                    raise

    def close(self) -> None:
        """Close all files, and open none any more; idempotent. One that is in use is closed when that ends."""
        with self._lock:
            self._closed = True
            idle = [handle for handle in self._handles.values() if not handle.users]
            self._handles.clear()
        for handle in idle:
            handle.close()

    def _used(self, path: str) -> Handle | None:
        """Return the file of `path`, in use from now on, if it is open."""
        with self._lock:
            self._refuse_closed(path)
            handle = self._handles.get(path)
            if handle is not None:
                handle.users += 1
                self._handles.move_to_end(path)
            return handle

    def _newly_opened(self, path: str, opened: Callable[[str], Handle]) -> Handle:
        """Open the file of `path` and return it, in use from now on."""
        handle = opened(path)
        try:
            with self._lock:
                self._refuse_closed(path)
                handle.users += 1
                self._handles[path] = handle
        except ReadError:
            handle.close()
            raise
        self._evict(self._most)
        return handle

    def _refuse_closed(self, path: str) -> None:
        if self._closed:
            raise ReadError(f"{self._label(path)}: its storage was closed")

    def _release(self, handle: Handle) -> None:
        with self._lock:
            handle.users -= 1
            unwanted = not handle.users and self._handles.get(handle.path) is not handle
        if unwanted:
            handle.close()

    def _evict(self, most: int) -> bool:
        """Close idle files until at most `most` are open; return whether there was one to close."""
        with self._lock:
            excess = max(len(self._handles) - most, 0)
            paths = [path for path, handle in self._handles.items() if not handle.users][:excess]
            idle = [self._handles.pop(path) for path in paths]
        for handle in idle:
            handle.close()
        return bool(idle)
