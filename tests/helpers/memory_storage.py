"""A storage whose files are bytes in memory, and that can fail or wait where a test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from tensorferry.errors import LocateError, ReadError
from tensorferry.storage.base import File

__all__ = ["MemoryStorage"]


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
