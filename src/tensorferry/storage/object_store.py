"""Objects below a prefix of a bucket, read by ranges. What is in them is the business of `formats`.

How a bucket is reached is in `object_access`, what it is asked in `object_client`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from tensorferry.core.names import nearest
from tensorferry.errors import AccessDenied, LocateError, ReadError, TensorferryError, shown
from tensorferry.storage.base import File
from tensorferry.storage.folder import refuse_unplain
from tensorferry.storage.object_access import connected
from tensorferry.storage.object_blocks import Block, Blocks, fetched, together
from tensorferry.storage.object_client import ObjectClient, Replaced, Traffic, Version
from tensorferry.storage.object_uri import ObjectUri
from tensorferry.storage.reading import asked

__all__ = ["LARGEST", "ObjectStorage"]

_Views = list[memoryview]

LARGEST = 8 << 20
"""Bytes that one request asks for at most. obstore holds them once, and they are copied to where they go."""

_SMALL = 64 << 10
"""Bytes up to which a read of a header brings what follows it, too: a request takes longer than they do."""
_TOGETHER = 8
"""Requests for short ranges that are made at a time."""
_MOST_FOLDERS = 100
"""Folders that `nested` looks into: each takes a request."""


class _Listing(NamedTuple):
    """Objects directly below a prefix, by name, and the folders there."""

    files: dict[str, File]
    folders: tuple[str, ...]


class ObjectStorage:
    """The objects below `root` in a bucket, as a `Storage` that also `SupportsScatter`, `SupportsRuns`,
    `SupportsBringing`, `SupportsNested` and `SupportsKind`.

    Of each object one version is read: that of the first answer. Servers are asked to refuse ranges of any other
    (``If-Match``), and what they say of each answer is compared. The list of objects is asked for once, so that what is
    put there later is not seen.

    A range is asked for in parts of at most `LARGEST` bytes, one after the other: who wants several at a time reads by
    several threads, as executors do. What `read_into` is asked for little of, as when headers are parsed, comes with
    what follows it. All methods may be called from several threads.

    store: of obstore. root: where in it, "" for all of it. uri: the address for people. access: with which credentials,
    in words that hold none. lists: whether the store tells what lies there. only: the name of the one object there is,
    where `store` is its very address, as of one that is signed.
    """

    def __init__(
        self,
        store: Any,
        root: str = "",
        *,
        uri: str,
        access: str = "asked with credentials of the caller",
        lists: bool = True,
        only: str | None = None,
    ) -> None:
        self._root, self._uri, self._lists, self._only = root.strip("/"), uri.rstrip("/"), lists, only
        self._client = ObjectClient(store, self._where, access)
        self._lock = Lock()
        self._listing: _Listing | None = None
        self._told: dict[str, File] = {}
        self._versions: dict[str, Version] = {}
        self._blocks = Blocks()

    @classmethod
    def at(cls, uri: ObjectUri, *, only: str | None = None) -> Self:
        """Return the objects below `uri`, or the one that `uri` is, where `only` is its name. Asks for nothing yet.

        Raises ConfigError without obstore, or for an environment that makes no sense; AccessDenied without credentials.
        """
        store, words = connected(uri)
        if uri.service != "http":
            return cls(store, uri.key, uri=uri.text, access=words)
        where = uri.parent.text if only is not None else uri.text
        return cls(store, uri=where, access=words, lists=False, only=only)

    @property
    def uri(self) -> str:
        """The address, without queries, keys and passwords."""
        return self._uri

    @property
    def traffic(self) -> Traffic:
        """What was asked so far, and answered."""
        return self._client.traffic

    def list(self) -> Sequence[File]:
        """Return the objects directly below the prefix, sorted by path, as they were when this was first asked.

        Neither what is further below, nor dot files. Raises LocateError where there is nothing at all, with names that
        are like it; AccessDenied where nobody may see it, as over HTTP.
        """
        files, folders = self._listed()
        if not files and not folders:
            raise LocateError(f"{self._where}: nothing lies there{self._similar()}")
        return [file for name, file in sorted(files.items()) if not name.startswith(".")]

    def nested(self) -> Sequence[str]:
        """Return the paths of the objects one level below; see `SupportsNested`."""
        folders = [name for name in self._listed().folders if not name.startswith(".")]
        paths = []
        for folder in folders[:_MOST_FOLDERS]:
            with suppress(AccessDenied):  # what cannot be looked into is no hint
                below = self._below(posixpath.join(self._root, folder)).files
                paths += [f"{folder}/{name}" for name in sorted(below) if not name.startswith(".")]
        return paths

    def stat(self, path: str) -> File:
        """Return the object at `path`, as it was when it was first listed or asked for.

        Raises LocateError where there is none, AccessDenied, UnsafeFile where `path` is no plain relative path.
        """
        refuse_unplain(path, self._label(path))
        with self._lock:
            told = self._told.get(path) or self._in_list(path)
            is_listed = self._listing is not None and "/" not in path
        if told is not None:
            return told
        if is_listed:
            raise LocateError(f"{self._label(path)}: there is no such object")
        file = self._file(path, self._held(path, self._look(path)))
        with self._lock:
            return self._told.setdefault(path, file)

    def version(self, path: str) -> str:
        """Return which object is read, and which version of it; of one that was not read yet, what the list says."""
        with self._lock:
            read = self._versions.get(path)
        return str(self.stat(path).identity if read is None else self._file(path, read).identity)

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Fill `out`, which is writable and contiguous, from byte `offset` of `path`, or raise ReadError."""
        views, wanted = self._asked(path, offset, (out,))
        part = self._blocks.find(path, offset, wanted)
        if part is None and 0 < wanted <= _SMALL:
            part = self._ahead(path, offset, wanted).part(offset, wanted)
        if part is None:
            self._fill(path, offset, views, wanted)
        elif views:
            views[0][:] = part

    def bring(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Read short ranges of `path`, several at a time, to be asked for next; see `SupportsBringing`."""
        wanted = list(together(ranges, self.stat(path).size))
        self._blocks.bring(path, fetched(lambda *one: bytes(self._range(path, *one)), wanted, _TOGETHER))

    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        """Fill `outs` one after the other from one contiguous range of `path`; nothing more is read."""
        self._fill(path, offset, *self._asked(path, offset, outs))

    def read_runs(self, path: str, offset: int, stride: int, run: int, out: memoryview) -> None:
        """Fill `out` with runs of `run` bytes, one every `stride` bytes of `path` from `offset` on: a request each."""
        for n in range(len(out) // run):
            self.read_vector(path, offset + n * stride, (out[n * run : (n + 1) * run],))

    def kind(self, path: str) -> Literal["remote"]:
        """Return "remote": each request takes long, and many may be under way."""
        return "remote"

    def check_unchanged(self) -> None:
        """Raise ReadError if an object that was read is another version by now.

        One more list tells of all that were listed, where several were read. That all bytes are of one version is known
        already, as far as the server has ETags.
        """
        with self._lock:
            read, listing = dict(self._versions), self._listing
        listed = [path for path in read if listing is not None and path in listing.files]
        if listing is not None and len(listed) > 1:
            now = self._below(self._root).files
            same = [p for p in listed if p in now and now[p].identity == listing.files[p].identity]
            read = {path: version for path, version in read.items() if path not in same}
        for path, version in read.items():
            self._look_again(path, version)

    def close(self) -> None:
        """Let go of connections and of what was read ahead; idempotent."""
        self._client.close()
        self._blocks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ObjectStorage({self._where!r})"

    # -- what lies there ----------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return shown(self._uri, 300)

    def _label(self, path: str) -> str:
        return f"{shown(path)} ({self._where})"

    def _key(self, path: str) -> str:
        refuse_unplain(path, self._label(path))
        if self._only is None:
            return posixpath.join(self._root, path)
        if path != self._only:
            raise LocateError(f"{self._label(path)}: nothing but {shown(self._only)} was named")
        return ""

    def _file(self, path: str, version: Version) -> File:
        return File(path, version.size, f"{self._uri}/{path} {version.identity}")

    def _listed(self) -> _Listing:
        if self._listing is None:
            if not self._lists:
                raise AccessDenied(f"{self._where}: servers of HTTP tell no list: name the weight file, or its index")
            self._listing = self._below(self._root)
        return self._listing

    def _below(self, root: str) -> _Listing:
        """Return what is directly below a prefix now."""
        objects, prefixes = self._client.list(root)
        start = len(root) + 1 if root else 0
        inside = root.removeprefix(self._root).strip("/")
        files = {}
        for meta in objects:
            name = meta["path"][start:]
            if name and "/" not in name:  # a store may have an object that stands for the folder itself
                files[name] = self._file(posixpath.join(inside, name), Version.of(meta))
        return _Listing(files, tuple(sorted(prefix.rstrip("/")[start:] for prefix in prefixes)))

    def _in_list(self, path: str) -> File | None:
        return None if self._listing is None else self._listing.files.get(path)

    def _similar(self) -> str:
        """Return what lies beside the prefix and is called like it, to be put behind a message."""
        parent, name = posixpath.split(self._root)
        if not name:
            return ""
        with suppress(TensorferryError):
            beside = self._below(parent)
            if near := nearest(name, [*beside.folders, *beside.files]):
                return f"; did you mean {', '.join(map(shown, near))}?"
        return ""

    # -- which version it is ------------------------------------------------------------------------------------------

    def _look(self, path: str) -> Version:
        """Ask what an object is now. What signs an address signs one way of asking, which is to get it."""
        return self._client.look(self._key(path), self._label(path), by_getting=self._only is not None)

    def _look_again(self, path: str, before: Version) -> None:
        try:
            now = self._look(path)
        except AccessDenied:
            raise
        except LocateError:
            self._refuse(path, "it is no longer there")
        else:
            self._refuse(path, before.differs(now))

    def _held(self, path: str, now: Version) -> Version:
        """Return the version of `path` that is read, which `now` has to be; it becomes that one if there is none."""
        with self._lock:
            before, told = self._versions.setdefault(path, now), self._told.get(path) or self._in_list(path)
        self._refuse(path, before.differs(now))
        if told is not None and told.size != now.size:
            self._refuse(path, f"its size went from {told.size} to {now.size} bytes")
        return before

    def _refuse(self, path: str, difference: str) -> None:
        if difference:
            raise ReadError(
                f"{self._label(path)}: changed while it was in use: {difference}; "
                "what was read from it cannot be trusted: load again"
            )

    # -- reading ------------------------------------------------------------------------------------------------------

    def _asked(self, path: str, offset: int, outs: Sequence[memoryview]) -> tuple[_Views, int]:
        """Return what `asked` does, of a range that the object has."""
        views, wanted = asked(self._label, path, offset, outs)
        if offset + wanted > (size := self.stat(path).size):
            raise ReadError(
                f"{self._label(path)}: ends inside a read: wanted {wanted} bytes at offset {offset}, it has {size}; "
                "it is shorter than its header says"
            )
        return views, wanted

    def _ahead(self, path: str, offset: int, wanted: int) -> Block:
        """Read a range and what follows it, and keep it."""
        length = min(max(self._blocks.ahead(path, offset), wanted), self.stat(path).size - offset)
        block = Block(offset, bytes(self._range(path, offset, length)))
        self._blocks.keep(path, block)
        return block

    def _fill(self, path: str, offset: int, views: _Views, wanted: int) -> None:
        for length, group in _parts(views, wanted):
            data, at = memoryview(self._range(path, offset, length)), 0
            for view in group:
                view[:] = data[at : at + len(view)]
                at += len(view)
            offset += length

    def _range(self, path: str, offset: int, length: int) -> Any:
        """Return a range of the version of `path` that is read, as a buffer of exactly so many bytes."""
        known = self._versions.get(path)
        try:
            version, data = self._client.range(self._key(path), offset, length, known, self._label(path))
        except AccessDenied:
            raise
        except (LocateError, Replaced):
            if known is None:
                raise
            self._look_again(path, known)
            self._refuse(path, "the server says that it is another one")
            raise
        self._held(path, version)
        return data


def _parts(views: Iterable[memoryview], wanted: int) -> Iterator[tuple[int, Sequence[memoryview]]]:
    """Yield lengths of at most `LARGEST` bytes, about equal, and the parts of `views` that each of them fills."""
    most = -(-wanted // max(1, -(-wanted // LARGEST)))
    group: list[memoryview] = []
    room = most
    for view in views:
        rest = view
        while rest:
            piece, rest = rest[:room], rest[room:]
            group.append(piece)
            room -= len(piece)
            if not room:
                yield most, group
                group, room = [], most
    if group:
        yield most - room, group
