"""Small reads of one file, a block at a time: headers and directories. Knows no format."""

from __future__ import annotations

from tensorferry.errors import CorruptFile, shown
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import read_bytes

__all__ = ["Stream", "Window"]

_LINE = 1024
"""The longest line of text that `Stream.line` looks for, in bytes."""


class Window:
    """Reads pieces of `file`; neighbouring small ones come out of one block. Not for several threads."""

    __slots__ = ("_block", "_bytes", "_start", "_storage", "file")

    def __init__(self, storage: Storage, file: File, *, block: int) -> None:
        self.file = file
        self._storage = storage
        self._block = block
        self._start = 0
        self._bytes = b""

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`. Raises CorruptFile where the file is shorter than that."""
        if offset < 0 or offset + length > self.file.size:
            raise CorruptFile(
                f"{shown(self.file.path)}: truncated: bytes {offset:,} to {offset + length:,} are needed, "
                f"the file has {self.file.size:,}; incomplete download?"
            )
        at = offset - self._start
        if at < 0 or at + length > len(self._bytes):
            self._load(offset, length)
            at = 0
        return self._bytes[at : at + length]

    def _load(self, offset: int, length: int) -> None:
        block = min(max(length, self._block), self.file.size - offset)
        self._start, self._bytes = offset, read_bytes(self._storage, self.file.path, offset, block)


class Stream:
    """The bytes `start <= offset < stop` of a window's file, taken one after the other."""

    __slots__ = ("_at", "_base", "_bytes", "_chunk", "_stop", "_window")

    def __init__(self, window: Window, start: int, stop: int, *, chunk: int = 1 << 16) -> None:
        self._window = window
        self._stop = stop
        self._chunk = chunk
        self._base = start
        self._bytes = b""
        self._at = 0

    @property
    def position(self) -> int:
        """The offset in the file of the next byte."""
        return self._base + self._at

    @property
    def remaining(self) -> int:
        """How many bytes are left."""
        return self._stop - self.position

    def byte(self) -> int:
        """Return the next byte."""
        at = self._at
        if at >= len(self._bytes):
            self._fill(1)
            at = 0
        self._at = at + 1
        return self._bytes[at]

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes."""
        end = self._at + length
        if end > len(self._bytes):
            self._fill(length)
            end = length
        piece = self._bytes[end - length : end]
        self._at = end
        return piece

    def line(self) -> bytes:
        """Return the bytes before the next line feed, which is passed over too."""
        if b"\n" not in self._bytes[self._at : self._at + _LINE]:
            self._fill(min(_LINE, self.remaining))
        end = self._bytes.find(b"\n", self._at, self._at + _LINE)
        if end < 0:
            raise CorruptFile(f"{shown(self._window.file.path)}: a line at byte {self.position:,} does not end")
        piece, self._at = self._bytes[self._at : end], end + 1
        return piece

    def skip(self, length: int) -> None:
        """Pass over `length` bytes without reading them."""
        self._need(length)
        self._base, self._bytes, self._at = self.position + length, b"", 0

    def _need(self, length: int) -> None:
        if length > self.remaining:
            raise CorruptFile(
                f"{shown(self._window.file.path)}: truncated: {length:,} bytes are needed at byte {self.position:,}, "
                f"{max(self.remaining, 0):,} are left"
            )

    def _fill(self, length: int) -> None:
        self._need(length)
        start = self.position
        self._bytes = self._window.read(start, min(max(length, self._chunk), self._stop - start))
        self._base, self._at = start, 0
