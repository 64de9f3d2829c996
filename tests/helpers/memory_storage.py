"""A storage whose files are bytes in memory, and that can fail or wait where a test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from tensorferry.errors import LocateError, ReadError
from tensorferry.storage.base import File, Uncached

__all__ = ["MemoryStorage", "UncachedStorage"]


class MemoryStorage:
    """Files by name. `before_read` is called with (path, offset, length) before each read and may raise."""

    uri = "memory"

    def __init__(
        self, files: Mapping[str, bytes], *, before_read: Callable[[str, int, int], None] | None = None
    ) -> None:
        self.files = dict(files)
        self.before_read = before_read
        self.reads: list[tuple[str, int, int]] = []
        self.checked = 0

    def list(self) -> Sequence[File]:
        return [File(name, len(data), name) for name, data in sorted(self.files.items())]

    def stat(self, path: str) -> File:
        if path not in self.files:
            raise LocateError(f"{path}: there is no such file")
        return File(path, len(self.files[path]), path)

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        if self.before_read is not None:
            self.before_read(path, offset, len(out))
        self.reads.append((path, offset, len(out)))
        data = self.files[path][offset : offset + len(out)]
        if len(data) < len(out):
            raise ReadError(f"{path}: ends inside a read")
        out[:] = data

    def kind(self, path: str) -> Literal["local"]:
        return "local"

    def check_unchanged(self) -> None:
        self.checked += 1

    def close(self) -> None:
        pass


class UncachedStorage(MemoryStorage):
    """One that can be read past a page cache, which has the share `cached` of all; `looks` counts who asked for it."""

    cached, looks, why = 0.0, 0, ""

    def uncached(self, path: str) -> Uncached:
        return Uncached(True, self.why)

    def cached_share(self, path: str, offset: int, length: int) -> float:
        self.looks += 1
        return self.cached

    def read_uncached(self, path: str, offset: int, outs: Sequence[memoryview]) -> int:
        for out in outs:
            self.read_into(path, offset, out)
            offset += len(out)
        return 0

    def absent_ranges(self, path: str, offset: int, length: int) -> None:
        return None

    def forget(self, path: str, offset: int, length: int) -> None: ...
