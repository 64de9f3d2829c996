"""Files of a folder on this machine, read at offsets. What is in them is the business of `formats`."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self, TypeVar

from tensorferry.errors import ReadError
from tensorferry.storage.base import File
from tensorferry.storage.folder import Folder, Identity, identity_of, located, refuse_irregular

__all__ = ["Counters", "LocalStorage"]

_IOV_MAX = 1024  # buffers that one preadv takes on Linux
_T = TypeVar("_T")
_SHARE = 4  # one in so many of the descriptors that the process may have is ours


@dataclass(frozen=True, slots=True)
class Counters:
    """What was read by requests that were filled. `reads` counts requests, not the system calls they took."""

    bytes_read: int = 0
    reads: int = 0


class _Handle:
    """An open file and how many reads use it right now."""

    __slots__ = ("fd", "path", "users")

    def __init__(self, path: str, fd: int) -> None:
        self.path, self.fd, self.users = path, fd, 0


class LocalStorage:
    """The folder `root`, and its sub-folders, as a `Storage` that also `SupportsMap`, `SupportsScatter` and
    `SupportsReadAhead`.

    Nothing outside the folder is opened, whatever a path or a link says; see `Folder` for the links of a hub cache.
    The folder itself may be a link. All methods may be called from several threads.

    A file is opened when it is first read and stays open, up to `max_open` files at once, or a quarter of what the
    process may open; the one that was not used for longest gives way, and must be the same file when it is opened
    again. Use the storage as a context manager, or call `close`.

    inside: the folder that `root` belongs to; a `root` that links lead out of it is refused. links_to: other folders
    that links may lead into.

    Raises LocateError if `root` is not there or not a folder, AccessDenied if it may not be looked into, UnsafeFile if
    it is not inside.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        inside: str | os.PathLike[str] | None = None,
        links_to: Sequence[str | os.PathLike[str]] = (),
        max_open: int = 128,
    ) -> None:
        self._folder = Folder(root, inside=inside, links_to=links_to)
        self._max_open = min(max_open, _most_descriptors() // _SHARE)
        self._lock = Lock()
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._opened: dict[str, Identity] = {}
        self._maps: dict[str, memoryview] = {}
        self._counters = Counters()
        self._closed = False

    @property
    def uri(self) -> str:
        """The folder, as it was given."""
        return self._folder.given

    @property
    def counters(self) -> Counters:
        """What was read through `read_into` and `read_vector` so far; pages of mappings are not seen."""
        return self._counters

    def list(self) -> Sequence[File]:
        """Return the files directly in the folder, sorted by path; neither sub-folders nor dot files.

        A link that leads nowhere is listed with `File.broken` and size 0, so that whoever selects it can say so; a
        pipe, socket or device is listed with size 0. `stat` and reading refuse all of them by name.
        """
        return self._folder.files()

    def stat(self, path: str) -> File:
        """Return the regular file at `path` as it is now; nothing is opened.

        Raises LocateError (absent, a folder, or a broken link, with its target), AccessDenied, or UnsafeFile
        (leads out of the folder, or is a pipe, a socket or a device).
        """
        _, info = self._folder.resolve(path)
        return File(path, info.st_size, identity_of(info))

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Fill `out`, which is writable and contiguous, from byte `offset` of `path`, or raise ReadError.

        `out` is not kept.
        """
        self.read_vector(path, offset, (out,))

    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        """Fill `outs` one after the other from one contiguous range of `path`: `read_into`, scattered."""
        views = [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in outs if view.nbytes]
        wanted = sum(map(len, views))
        if not 0 <= offset <= sys.maxsize - wanted:
            raise ReadError(f"{self._folder.label(path)}: {wanted} bytes at offset {offset} are no part of any file")
        with self._lend(path) as handle:
            got = _fill(handle.fd, self._folder.label(path), offset, views)
        if got < wanted:
            raise ReadError(
                f"{self._folder.label(path)}: ends inside a read: wanted {wanted} bytes at offset {offset}, got {got}; "
                "it is shorter than its header says, or was cut while it was read"
            )
        with self._lock:
            so_far = self._counters
            self._counters = Counters(so_far.bytes_read + got, so_far.reads + bool(wanted))

    def read_ahead(self, path: str, offset: int, length: int) -> None:
        """Have the kernel begin to read a range of `path` into its page cache; see `SupportsReadAhead`."""
        if not hasattr(os, "posix_fadvise"):
            return
        with self._lend(path) as handle, suppress(OSError):
            os.posix_fadvise(handle.fd, offset, length, os.POSIX_FADV_WILLNEED)

    def map(self, path: str) -> memoryview:
        """Return all of `path` as a read-only view of a private mapping, which holds one more descriptor.

        Asking again returns the same view. The pages stay as long as anything made from it is in use, even after
        `close`: unmapping them under a tensor would kill the process.
        """
        with self._lend(path) as handle, self._lock:
            if path not in self._maps:
                try:
                    self._maps[path] = self._with_room(lambda: _mapped(handle.fd))
                except OSError as error:
                    raise located(error, f"{self._folder.label(path)}: cannot be mapped") from None
            return self._maps[path]

    def local_path(self, path: str) -> str:
        """Return where `path` really is; raises as `stat` does."""
        real, _ = self._folder.resolve(path)
        return real

    def check_unchanged(self) -> None:
        """Raise ReadError if a file that was opened is another one now, or was written to.

        Device, inode, size and modification time are compared, both of what is open and of what the path leads to.
        """
        with self._lock:
            opened = dict(self._opened)
        for path, before in opened.items():
            for now in self._identities(path):
                self._refuse_change(path, before, now)

    def close(self) -> None:
        """Close all files and mappings; idempotent. A file that another thread is reading is closed when that ends."""
        with self._lock:
            self._closed = True
            idle = [handle.fd for handle in self._handles.values() if not handle.users]
            self._handles.clear()
            self._maps.clear()
        for fd in idle:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LocalStorage({self.uri!r})"

    @contextmanager
    def _lend(self, path: str) -> Iterator[_Handle]:
        """Lend the open file of `path`; it is not closed before it is back."""
        handle = self._acquire(path)
        try:
            yield handle
        finally:
            self._release(handle)

    def _acquire(self, path: str) -> _Handle:
        with self._lock:
            if self._closed:
                raise ReadError(f"{self._folder.label(path)}: its storage was closed")
            handle = self._handles.get(path)
            if handle is None:
                handle = self._handles[path] = _Handle(path, self._open(path))
            handle.users += 1
            self._handles.move_to_end(path)
            if len(self._handles) > self._max_open:
                self._evict(self._max_open)
        return handle

    def _release(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            unwanted = not handle.users and self._handles.get(handle.path) is not handle
        if unwanted:
            os.close(handle.fd)

    def _evict(self, most: int) -> bool:
        """Close idle files until at most `most` are open; return whether there was one to close."""
        idle = [path for path, handle in self._handles.items() if not handle.users][: len(self._handles) - most]
        for path in idle:
            os.close(self._handles.pop(path).fd)
        return bool(idle)

    def _with_room(self, act: Callable[[], _T]) -> _T:
        """Return ``act()``, which takes a descriptor: where the process has none left, ours make room for it."""
        while True:
            try:
                return act()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._evict(len(self._handles) // 2):
                    raise

    def _open(self, path: str) -> int:
        real, _ = self._folder.resolve(path)
        try:
            # The real path has no links, so a link there now was just put in; a pipe just put in would wait forever.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            fd = self._with_room(lambda: os.open(real, flags))
        except OSError as error:
            raise located(error, self._folder.label(path)) from None
        try:
            info = os.fstat(fd)
            refuse_irregular(info, self._folder.label(path))
            if (place := _place_of(fd)) is not None:  # a folder on the way may have become a link meanwhile
                self._folder.refuse_outside(path, place)
            self._refuse_change(path, self._opened.setdefault(path, identity_of(info)), identity_of(info))
        except BaseException:
            os.close(fd)
            raise
        _read_as_asked(fd)
        return fd

    def _identities(self, path: str) -> Iterator[Identity | None]:
        """Yield what `path` is now: the file that is open, if one is, then the file that the path leads to."""
        with self._lock:
            handle = self._handles.get(path)
            info = None if handle is None else os.fstat(handle.fd)
        if info is not None:
            yield identity_of(info)
        yield self._folder.now(path)

    def _refuse_change(self, path: str, before: Identity, now: Identity | None) -> None:
        if now != before:
            raise ReadError(
                f"{self._folder.label(path)}: changed while it was in use: {_difference(before, now)}; "
                "what was read from it cannot be trusted: load again"
            )


def _read_as_asked(fd: int) -> None:
    """Ask the kernel to bring the pages of a read and no more: what is wanted next is known and asked for here."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def _place_of(fd: int) -> str | None:
    """Return the real path of an open file, where the system tells it."""
    try:
        place = str(Path("/proc/self/fd", str(fd)).readlink())
    except OSError:
        return None
    return place.removesuffix(" (deleted)") if place.startswith("/") else None


def _most_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _difference(before: Identity, now: Identity | None) -> str:
    if now is None:
        return "it is no longer there"
    changes = []
    if before[:2] != now[:2]:
        changes.append("another file took its place")
    if before[2] != now[2]:
        changes.append(f"its size went from {before[2]} to {now[2]} bytes")
    return ", ".join(changes) or "it was written to (its modification time moved)"


def _fill(fd: int, label: str, offset: int, views: list[memoryview]) -> int:
    """Fill `views` as far as the file goes; return how many bytes that was."""
    done, first = 0, 0
    try:
        while first < len(views) and (got := os.preadv(fd, views[first : first + _IOV_MAX], offset + done)):
            done += got
            first = _advance(views, first, got)
    except OSError as error:
        raise ReadError(f"{label}: {error.strerror}, while reading at offset {offset + done}") from None
    return done


def _advance(views: list[memoryview], first: int, got: int) -> int:
    """Take `got` bytes off the front of `views` from `first` on; return the first that is not full."""
    while got:
        if got < len(views[first]):
            views[first] = views[first][got:]
            return first
        got -= len(views[first])
        first += 1
    return first


def _mapped(fd: int) -> memoryview:
    if not os.fstat(fd).st_size:
        return memoryview(b"")  # an empty file cannot be mapped
    return memoryview(mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
