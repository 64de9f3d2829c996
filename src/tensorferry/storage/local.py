"""Files of a folder on this machine, read at offsets. What is in them is the business of `formats`."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from threading import Lock, local
from types import TracebackType
from typing import Literal, Self

from tensorferry.errors import ReadError
from tensorferry.storage.base import File, LeasedFile, Uncached
from tensorferry.storage.direct import DirectFile, Filled, Spare
from tensorferry.storage.folder import Folder, Identity, identity_of, located, refuse_irregular
from tensorferry.storage.handle import Handle, fill, mapped, place_of, read_as_asked
from tensorferry.storage.leases import leased, lent
from tensorferry.storage.open_files import OpenFiles
from tensorferry.storage.page_cache import absent_ranges, cached_share, forget
from tensorferry.storage.reading import asked
from tensorferry.storage.runs import fill_runs

__all__ = ["Counters", "LocalStorage"]

_Views = list[memoryview]
_SHARE = 8  # one in so many of the descriptors that the process may have is that of one of our files, which have two


@dataclass(frozen=True, slots=True)
class Counters:
    """What was read by requests that were filled. `reads` counts requests, not the system calls they took."""

    bytes_read: int = 0
    reads: int = 0


class LocalStorage:
    """The folder `root`, and its sub-folders, as a `Storage` that also `SupportsMap`, `SupportsScatter`,
    `SupportsRuns`, `SupportsReadAhead`, `SupportsUncached`, `SupportsLease`, `SupportsLeasedFiles`, `SupportsNested`
    and `SupportsKind`.

    Nothing outside the folder is opened, whatever a path or a link says; see `Folder` for the links of a hub cache.
    The folder itself may be a link. All methods may be called from several threads.

    A file is opened when it is first read and stays open, up to `max_open` files at once, or an eighth of what the
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
        self._files = OpenFiles(min(max_open, _most_descriptors() // _SHARE), self._folder.label)
        self._lock = Lock()
        self._opened: dict[str, Identity] = {}
        self._maps: dict[tuple[str, bool], memoryview] = {}
        self._spare = local()
        self._counters = Counters()

    @property
    def uri(self) -> str:
        """The folder, as it was given."""
        return self._folder.given

    @property
    def counters(self) -> Counters:
        """What was read through `read_into` and `read_vector` so far; pages that are mapped or lent are not seen."""
        return self._counters

    def list(self) -> Sequence[File]:
        """Return the files directly in the folder, sorted by path; neither sub-folders nor dot files.

        A link that leads nowhere is listed with `File.broken` and size 0, so that whoever selects it can say so; a
        pipe, socket or device is listed with size 0. `stat` and reading refuse all of them by name.
        """
        return self._folder.files()

    def nested(self) -> Sequence[str]:
        """Return the paths of the files one level below; see `SupportsNested`."""
        return self._folder.nested()

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
        self._read(path, offset, (out,), touch=False)

    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        """Fill `outs` one after the other from one contiguous range of `path`.

        They are taken for memory that lasts, such as tensors: what nobody has touched of it is given its pages first.
        """
        self._read(path, offset, outs, touch=True)

    def _read(self, path: str, offset: int, outs: Sequence[memoryview], *, touch: bool) -> None:
        views, wanted = asked(self._folder.label, path, offset, outs)
        with self._held(path) as handle:
            got = fill(handle.fd, self._folder.label(path), offset, views, touch=touch and not handle.is_elsewhere)
        if got < wanted:
            raise self._short(path, offset, wanted, got)
        self._count(got, bool(wanted))

    def read_runs(self, path: str, offset: int, stride: int, run: int, out: memoryview) -> None:
        """Fill `out` with runs of `run` bytes, one every `stride` bytes of `path` from `offset` on; see `SupportsRuns`.

        Each run counts as a read.
        """
        if not 0 <= offset <= sys.maxsize - stride * (len(out) // run):
            raise ReadError(
                f"{self._folder.label(path)}: runs of {run} bytes from offset {offset} are no part of any file"
            )
        try:
            with self._held(path) as handle:
                got = fill_runs(handle.fd, offset, stride, run, out)
        except OSError as error:
            raise ReadError(
                f"{self._folder.label(path)}: {error.strerror}, while reading from offset {offset}"
            ) from None
        if got < len(out):
            raise self._short(path, offset + got // run * stride, run, got % run)
        self._count(got, len(out) // run)

    def _direct(self, handle: Handle) -> DirectFile | None:
        """Return a file as it can be read directly; None where the process has no descriptor left for that."""
        with suppress(OSError):
            return self._files.with_room(handle.direct)
        return None

    def _directly(self, handle: Handle, offset: int, views: _Views) -> Filled | None:
        if self._direct(handle) is None:
            return None
        if not hasattr(self._spare, "buffers"):
            self._spare.buffers = Spare()
        spare: Spare = self._spare.buffers
        try:
            return handle.read_direct(offset, views, spare)
        except OSError as error:
            label = self._folder.label(handle.path)
            raise ReadError(f"{label}: {error.strerror}, while reading at offset {offset}") from None

    def _short(self, path: str, offset: int, wanted: int, got: int) -> ReadError:
        return ReadError(
            f"{self._folder.label(path)}: ends inside a read: wanted {wanted} bytes at offset {offset}, got {got}; "
            "it is shorter than its header says, or was cut while it was read"
        )

    def _count(self, nbytes: int, reads: int) -> None:
        with self._lock:
            self._counters = Counters(self._counters.bytes_read + nbytes, self._counters.reads + reads)

    def read_ahead(self, path: str, offset: int, length: int) -> None:
        """Have the kernel begin to read a range of `path` into its page cache; see `SupportsReadAhead`."""
        if not hasattr(os, "posix_fadvise"):
            return
        with self._held(path) as handle, suppress(OSError):
            os.posix_fadvise(handle.fd, offset, length, os.POSIX_FADV_WILLNEED)

    def uncached(self, path: str) -> Uncached:
        """Return whether `path` can be read past the page cache; see `SupportsUncached`.

        That takes a second descriptor; where the process has none left, the first will do.
        """
        with self._held(path) as handle:
            direct = self._direct(handle)
        return Uncached(False, "too many files are open") if direct is None else Uncached(direct.fd >= 0, direct.why)

    def cached_share(self, path: str, offset: int, length: int) -> float:
        """Return about how much of a range is in the page cache; see `SupportsUncached`."""
        with self._held(path) as handle:
            return cached_share(handle.fd, offset, length)

    def read_uncached(self, path: str, offset: int, outs: Sequence[memoryview]) -> int | None:
        """Do what `read_vector` does past the page cache; see `SupportsUncached`.

        What does not lie in memory as it does in the file goes through buffers of a mebibyte, two for each thread.
        """
        views, wanted = asked(self._folder.label, path, offset, outs)
        if not wanted:
            return None
        with self._held(path) as handle:
            got = self._directly(handle, offset, views)
        if got is None:
            return None
        if got.nbytes < wanted:
            raise self._short(path, offset, wanted, got.nbytes)
        self._count(wanted, 1)
        return got.copied

    def absent_ranges(self, path: str, offset: int, length: int) -> Sequence[tuple[int, int]] | None:
        """Return which pages of a range the page cache does not have; see `SupportsUncached`."""
        with self._held(path) as handle:
            return absent_ranges(handle.fd, offset, length)

    def forget(self, path: str, offset: int, length: int) -> None:
        """Have the page cache let go of a range of `path`; see `SupportsUncached`."""
        with self._held(path) as handle, suppress(OSError):
            forget(handle.fd, offset, length)

    @contextmanager
    def lend(self, path: str, offset: int, length: int) -> Iterator[memoryview | None]:
        """Lend a range of `path` as it lies in the page cache, under a lease; see `SupportsLease`."""
        with self._held(path) as handle:
            if handle.is_elsewhere:
                yield None
                return
            with lent(handle.fd, handle.lease, offset, length) as view:
                yield view

    @contextmanager
    def leased(self, path: str) -> Iterator[LeasedFile | None]:
        """Lease `path` for the time of a block, in which it stays open; see `SupportsLeasedFiles`."""
        with self._held(path) as handle:
            if handle.is_elsewhere or not self._files.has_room:
                yield None
                return
            with leased(handle.fd, handle.lease) as file:
                yield file

    def map(self, path: str, *, writable: bool = False) -> memoryview:
        """Return all of `path` as a view of a private mapping, which holds one more descriptor.

        writable: what is written to the view stays in this process and never reaches the file. Asking again returns
        the same view. The pages stay as long as anything made from it is in use, even after `close`: unmapping them
        under a tensor would kill the process.
        """
        key = path, writable
        with self._held(path) as handle, self._files.turn(path):
            if (known := self._maps.get(key)) is not None:
                return known
            try:
                view = self._files.with_room(lambda: mapped(handle.fd, writable=writable))
            except OSError as error:
                raise located(error, f"{self._folder.label(path)}: cannot be mapped") from None
            self._maps[key] = view
            return view

    def kind(self, path: str) -> Literal["local", "network"]:
        """Return "network" where `path` lies on a file system of another machine, or one in user space."""
        with self._held(path) as handle:
            return "network" if handle.is_elsewhere else "local"

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
        self._files.close()
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LocalStorage({self.uri!r})"

    def _held(self, path: str) -> AbstractContextManager[Handle]:
        """Return what has the file of `path` open within its block."""
        return self._files.held(path, self._open)

    def _open(self, path: str) -> Handle:
        real, _ = self._folder.resolve(path)
        try:
            # The real path has no links, so a link there now was just put in; a pipe just put in would wait forever.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            handle = self._files.with_room(lambda: Handle(path, os.open(real, flags)))
        except OSError as error:
            raise located(error, self._folder.label(path)) from None
        try:
            info = os.fstat(handle.fd)
            refuse_irregular(info, self._folder.label(path))
            if (place := place_of(handle.fd)) is not None:  # a folder on the way may have become a link meanwhile
                self._folder.refuse_outside(path, place)
            with self._lock:
                before = self._opened.setdefault(path, identity_of(info))
            self._refuse_change(path, before, identity_of(info))
        except BaseException:
            handle.close()
            raise
        read_as_asked(handle.fd)
        return handle

    def _identities(self, path: str) -> Iterator[Identity | None]:
        """Yield what `path` is now: the file that is open, if one is, then the file that the path leads to."""
        with self._files.held_if_open(path) as handle:
            if handle is not None:
                yield identity_of(os.fstat(handle.fd))
        yield self._folder.now(path)

    def _refuse_change(self, path: str, before: Identity, now: Identity | None) -> None:
        if now != before:
            raise ReadError(
                f"{self._folder.label(path)}: changed while it was in use: {_difference(before, now)}; "
                "what was read from it cannot be trusted: load again"
            )


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
