"""Several storages as one, for models whose weights lie in several places. Reads nothing of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from tensorferry.errors import LocateError, shown
from tensorferry.storage.base import (
    File,
    LeasedFile,
    Storage,
    StorageKind,
    SupportsLease,
    SupportsLeasedFiles,
    SupportsLocalPath,
    SupportsReadAhead,
    SupportsUncached,
    Uncached,
)
from tensorferry.storage.reading import kind_of, read_runs, scatter, version_of

__all__ = ["JoinedStorage"]


class JoinedStorage:
    """The files of `parts`, each below the name of its part: ``text/model.safetensors`` is in the part ``text``.

    Names of parts hold no slash. Closing it closes the parts.
    """

    def __init__(self, parts: Mapping[str, Storage]) -> None:
        self._parts = dict(parts)

    @property
    def uri(self) -> str:
        """The places of all parts."""
        return " + ".join(part.uri for part in self._parts.values())

    def list(self) -> Sequence[File]:
        """Return the files of every part, by part."""
        return [_under(name, file) for name, part in self._parts.items() for file in part.list()]

    def stat(self, path: str) -> File:
        """Return a file of the part that `path` begins with; raises LocateError where there is no such part."""
        name, part, inner = self._find(path)
        return _under(name, part.stat(inner))

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Fill `out` from a file of a part."""
        _, part, inner = self._find(path)
        part.read_into(inner, offset, out)

    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        """Fill `outs` one after the other, with one read where the part can."""
        _, part, inner = self._find(path)
        scatter(part, inner, offset, outs)

    def read_runs(self, path: str, offset: int, stride: int, run: int, out: memoryview) -> None:
        """Fill `out` with runs of bytes at equal distances, in one go where the part can."""
        _, part, inner = self._find(path)
        read_runs(part, inner, offset, stride, run, out)

    def read_ahead(self, path: str, offset: int, length: int) -> None:
        """Pass the hint on to parts that take it."""
        _, part, inner = self._find(path)
        if isinstance(part, SupportsReadAhead):
            part.read_ahead(inner, offset, length)

    def uncached(self, path: str) -> Uncached:
        """Return whether a file of a part can be read past the page cache."""
        _, part, inner = self._find(path)
        return part.uncached(inner) if isinstance(part, SupportsUncached) else Uncached(False, "not by its storage")

    def cached_share(self, path: str, offset: int, length: int) -> float:
        """Return about how much of a range is in the page cache, as far as the part can tell."""
        _, part, inner = self._find(path)
        return part.cached_share(inner, offset, length) if isinstance(part, SupportsUncached) else 0.0

    def read_uncached(self, path: str, offset: int, outs: Sequence[memoryview]) -> int | None:
        """Fill `outs` past the page cache, if the part can."""
        _, part, inner = self._find(path)
        return part.read_uncached(inner, offset, outs) if isinstance(part, SupportsUncached) else None

    def absent_ranges(self, path: str, offset: int, length: int) -> Sequence[tuple[int, int]] | None:
        """Return which pages of a range the page cache does not have, if the part can tell."""
        _, part, inner = self._find(path)
        return part.absent_ranges(inner, offset, length) if isinstance(part, SupportsUncached) else None

    def forget(self, path: str, offset: int, length: int) -> None:
        """Pass the hint on to parts that take it."""
        _, part, inner = self._find(path)
        if isinstance(part, SupportsUncached):
            part.forget(inner, offset, length)

    def lend(self, path: str, offset: int, length: int) -> AbstractContextManager[memoryview | None]:
        """Lend a range of a file of a part, if the part can."""
        _, part, inner = self._find(path)
        return part.lend(inner, offset, length) if isinstance(part, SupportsLease) else nullcontext()

    def leased(self, path: str) -> AbstractContextManager[LeasedFile | None]:
        """Lease a file of a part, if the part can."""
        _, part, inner = self._find(path)
        return part.leased(inner) if isinstance(part, SupportsLeasedFiles) else nullcontext()

    def kind(self, path: str) -> StorageKind:
        """Return which kind of storage a file of a part lies on; local where the part does not know."""
        _, part, inner = self._find(path)
        return kind_of(part, inner)

    def version(self, path: str) -> str:
        """Return what tells the content that is read of a file of a part from all others."""
        _, part, inner = self._find(path)
        return version_of(part, inner)

    def local_path(self, path: str) -> str | None:
        """Return where a file of a part is on this machine, if the part can tell."""
        _, part, inner = self._find(path)
        return part.local_path(inner) if isinstance(part, SupportsLocalPath) else None

    def check_unchanged(self) -> None:
        """Raise ReadError if a file that was read from any part is no longer the one that was opened."""
        for part in self._parts.values():
            part.check_unchanged()

    def close(self) -> None:
        """Close all parts; idempotent."""
        for part in self._parts.values():
            part.close()

    def __repr__(self) -> str:
        return f"JoinedStorage({', '.join(self._parts)})"

    def _find(self, path: str) -> tuple[str, Storage, str]:
        name, _, inner = path.partition("/")
        part = self._parts.get(name)
        if part is None:
            raise LocateError(f"{shown(path)}: no part is called {shown(name)!r}; there are {', '.join(self._parts)}")
        return name, part, inner


def _under(name: str, file: File) -> File:
    return File(f"{name}/{file.path}", file.size, file.identity, file.broken)
