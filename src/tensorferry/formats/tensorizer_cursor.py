"""Takes the fields of Tensorizer files one after the other, and never past where they have to end."""

from __future__ import annotations

import struct
from functools import cache

from tensorferry.errors import CorruptFile, shown
from tensorferry.formats.windows import Window

__all__ = ["Cursor"]


class Cursor:
    """Reads from `at` up to `stop`. what: the file, in messages. subject: which part of it is being read."""

    __slots__ = ("at", "stop", "subject", "what", "window")

    def __init__(self, window: Window, at: int, stop: int, what: str, subject: str) -> None:
        self.window, self.at, self.stop, self.what, self.subject = window, at, stop, what, subject

    @property
    def left(self) -> int:
        """Bytes from here to where the fields end."""
        return self.stop - self.at

    def take(self, length: int, thing: str) -> bytes:
        """Return the next `length` bytes."""
        at = self.at
        self.skip(length, thing)
        return self.window.read(at, length)

    def skip(self, length: int, thing: str) -> None:
        """Pass over the next `length` bytes."""
        if length > self.left:
            raise self.corrupt(f"truncated: {thing} takes {length:,} bytes at byte {self.at:,}, {self.left:,} are left")
        self.at += length

    def number(self, format: str, thing: str) -> int:
        """Return the next number; `format` is a letter of the module struct, and its order is little-endian."""
        (found,) = self.numbers(format, thing)
        return found

    def numbers(self, formats: str, thing: str) -> tuple[int, ...]:
        """Return the next numbers, one for each letter of `formats`."""
        several = _struct(formats)
        return several.unpack(self.take(several.size, thing))

    def corrupt(self, fault: str) -> CorruptFile:
        """Return an error that says where `fault` is."""
        return CorruptFile(f"{self.what}: {shown(self.subject)}: {fault}")


@cache
def _struct(formats: str) -> struct.Struct:
    return struct.Struct("<" + formats)
