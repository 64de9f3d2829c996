"""Tensorizer files byte by byte, right or wrong in any single field."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["T", "crypt", "file_of", "hashes", "macs"]


@dataclass(frozen=True)
class T:
    """A tensor: its fields as both index and header have them; `index` has those that differ in the index.

    Keys of `index`: name, kind, dtype, dims, header, data, length; the last three are added to what is right.
    """

    name: bytes = b"t"
    kind: int = 2
    dtype: bytes = b"<f4"
    dims: Sequence[int] = (2,)
    data: bytes = bytes(8)
    index: Mapping[str, Any] = field(default_factory=dict)
    hashes: bytes | None = None
    after: bytes = b""  # encryption and padding
    header_length: int | None = None
    data_length: int | None = None
    version: int | None = None  # of its entry


def hashes(*listed: tuple[int, bytes], length: int | None = None, count: int | None = None) -> bytes:
    """Return the section of hashes: kind and value of each."""
    body = b"".join(bytes([kind, len(value)]) + value for kind, value in listed)
    count = len(listed) if count is None else count
    return struct.pack("<HB", len(body) + 1 if length is None else length, count) + body


def crypt(*parts: tuple[int, bytes], length: int | None = None, count: int | None = None) -> bytes:
    """Return the section that says how a tensor is encrypted: number and contents of each part."""
    body = b"".join(struct.pack("<QH", len(content) + 2, number) + content for number, content in parts)
    body = struct.pack("<H", len(parts) if count is None else count) + body
    return struct.pack("<Q", len(body) if length is None else length) + body


def macs(size: int, count: int) -> tuple[int, bytes]:
    """Return the part that says that there are `count` boxes of `size` bytes."""
    return 2, struct.pack("<Q24xQ", size, count) + bytes(16 * min(count, 64))


def _dims(dims: Sequence[int], long: bool) -> bytes:
    return struct.pack(f"<B{len(dims)}{'Q' if long else 'I'}", len(dims), *dims)


def _described(fields: Mapping[str, Any], long: bool) -> bytes:
    dtype: bytes = fields["dtype"]
    return bytes([len(dtype)]) + dtype + _dims(fields["dims"], long)


def _header(t: T, zeroed: bool = False) -> bytes:
    long = t.version == 5
    start = struct.pack("<HBH", 0, t.kind, len(t.name)) + t.name + _described(vars(t), long)
    section = hashes((0, bytes(4))) if t.hashes is None else t.hashes
    body = start + section + t.after
    length = 16 + len(body) if t.header_length is None else t.header_length
    data_length = len(t.data) if t.data_length is None else t.data_length
    made = struct.pack("<Q", length) + body + struct.pack("<q", data_length)
    if t.hashes is not None or zeroed:
        return made
    value = zlib.crc32(t.data, zlib.crc32(made)).to_bytes(4, "little")
    at = 8 + len(start) + len(hashes((0, bytes(4)))) - 4
    return made[:at] + value + made[at + 4 :]


def file_of(
    tensors: Sequence[T] = (T(),),
    *,
    magic: bytes = b"|TZR|",
    version: int = 1,
    flags: int = 0,
    count: int | None = None,
    index_length: int | None = None,
    index_padding: int = 0,
    end: bytes = bytes(8),
) -> bytes:
    """Return a whole file."""
    typed = bool(flags & 2)
    entries = [_entry(t, typed, 0, 0) for t in tensors]
    at = 73 + sum(map(len, entries)) + index_padding
    index, bodies = b"", b""
    for t in tensors:
        header = _header(t)
        index += _entry(t, typed, at, at + len(header))
        bodies += header + t.data
        at += len(header) + len(t.data)
    index += bytes(index_padding)
    length = len(index) if index_length is None else index_length
    number = len(tensors) if count is None else count
    head = magic + struct.pack("<I", version) + flags.to_bytes(32, "little") + struct.pack("<Q8xQQ", 0, number, length)
    return head + index + bodies + end


def _entry(t: T, typed: bool, header: int, data: int) -> bytes:
    fields: dict[str, Any] = {**vars(t), **t.index}
    long = t.version == 5
    version = struct.pack("<I", t.version or 1) if typed else b""
    name: bytes = fields["name"]
    place = (
        header + t.index.get("header", 0),
        data + t.index.get("data", 0),
        len(t.data) + t.index.get("length", 0),
    )
    return (
        version
        + struct.pack("<H", len(name))
        + name
        + bytes([fields["kind"]])
        + _described(fields, long)
        + struct.pack("<3Q", *(number % (1 << 64) for number in place))
    )
