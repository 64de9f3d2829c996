"""The header of a GGUF file: metadata and what it says of its tensors, each rule checked as it is read.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Where the tensors lie is judged in `gguf`.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from tensorferry.core.boxes import Shape
from tensorferry.errors import CorruptFile, UnknownFormat, shown
from tensorferry.formats.gguf_metadata import GgufMetadata, Texts, Value, ValueType, numbers_of
from tensorferry.formats.sniff import SNIFF_BYTES, describe_foreign
from tensorferry.formats.windows import Window
from tensorferry.storage.base import File, Storage

__all__ = ["MAX_HEADER", "GgufHeader", "GgufTensor", "read_header", "read_metadata"]

MAX_HEADER = 100_000_000
"""Bytes that metadata and tensor descriptions may take. The format names no limit; real ones take up to 30 MB."""

_BLOCK = 1 << 20
_MAX_KEYS = 1 << 16
_MAX_NAME = (1 << 16) - 1  # bytes of a key, as the format says, and of a tensor's name
_MAX_TENSORS = 1 << 17
_MAX_STRINGS = 1 << 22  # in all arrays of a file
_MAX_ARRAYS = 1 << 16  # within arrays
_LONG_TEXT = 1 << 20  # bytes of a string that is left in the file where arrays are
_TEXT_TOTAL = 16 << 20  # bytes of all strings after which the others are left, too
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_INT64_MAX = 2**63 - 1
_OLD = (b"lmgg", b"fmgg", b"tjgg", b"algg")


class GgufTensor(NamedTuple):
    """A tensor as the header has it. shape: slowest dimension first. offset: in bytes, from the start of the data."""

    name: str
    number: int
    shape: Shape
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A header that keeps the rules by itself.

    little: whether numbers have their low byte first. data_start: offset in the file of the tensors' bytes.
    tensors: in the order of the header.
    """

    version: int
    little: bool
    alignment: int
    metadata: GgufMetadata
    tensors: tuple[GgufTensor, ...]
    data_start: int


def read_header(storage: Storage, file: File, *, arrays: bool = True) -> GgufHeader:
    """Return the header of `file`. Without `arrays`, these, strings over 1 MiB, and those after 16 MiB of others are
    only checked, and None.

    Beyond the rules of the format, a header may take 100 MB, with 65,536 keys, 131,072 tensors, and 4,194,304 strings
    and 65,536 arrays in arrays. Without arrays, refusing a file takes under 64 MiB and about a second at most.

    Raises CorruptFile for a file that breaks a rule of the format, UnknownFormat for one that is not GGUF at all or of
    a version that is not known here.
    """
    if file.size == 0:  # as a broken link or a pipe are listed too; `stat` has their own words
        file = storage.stat(file.path)
    what = f"{shown(file.path)} ({shown(storage.uri, 300)})"
    window = Window(storage, file, block=_BLOCK)
    version, little = _version(window, what)
    cursor = _Cursor(window, 8, little, what)
    tensor_count, key_count = cursor.u64("the number of tensors"), cursor.u64("the number of keys")
    metadata = _read_metadata(cursor, _believed(cursor, key_count, 13, "keys"), arrays)
    cursor.subject = "tensors"
    tensors = _read_tensors(cursor, _believed(cursor, tensor_count, 24, "tensors"))
    alignment = _alignment(metadata, what)
    return GgufHeader(version, little, alignment, metadata, tensors, -(-cursor.at // alignment) * alignment)


def read_metadata(storage: Storage, file: File) -> GgufMetadata:
    """Return all metadata of `file`, of a split model its first part. Raises as `read_header`."""
    return read_header(storage, file).metadata


class _Cursor:
    """Takes what follows in a header, never past the file's end or the header's limit. subject: what is being read."""

    __slots__ = ("_u32", "_u64", "arrays", "at", "kept", "little", "strings", "subject", "what", "window")

    def __init__(self, window: Window, at: int, little: bool, what: str) -> None:
        order = "<" if little else ">"
        self.window, self.at, self.little, self.what = window, at, little, what
        self.subject = "the start"
        self.strings = self.arrays = self.kept = 0
        self._u32, self._u64 = struct.Struct(order + "I").unpack, struct.Struct(order + "Q").unpack

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return self.window.file.size - self.at

    def need(self, length: int, thing: str) -> None:
        """Raise unless `length` bytes follow."""
        if length > self.left:
            raise self.corrupt(f"truncated: {thing} takes {length:,} bytes at byte {self.at:,}, {self.left:,} are left")
        if self.at + length > MAX_HEADER:
            raise self.corrupt(f"{thing} would take the header over {MAX_HEADER:,} bytes")

    def take(self, length: int, thing: str) -> bytes:
        self.need(length, thing)
        at = self.at
        self.at = at + length
        return self.window.read(at, length)

    def skip(self, length: int, thing: str) -> None:
        self.need(length, thing)
        self.at += length

    def u32(self, thing: str) -> int:
        return int(self._u32(self.take(4, thing))[0])

    def u64(self, thing: str) -> int:
        return int(self._u64(self.take(8, thing))[0])

    def name(self, thing: str) -> str:
        """Take a key or a name: UTF-8 of a length that is not absurd."""
        length = self.u64(f"the length of {thing}")
        self.need(length, thing)
        if length > _MAX_NAME:
            raise self.corrupt(f"{thing} of {length:,} bytes, at byte {self.at:,}; the limit is {_MAX_NAME:,}")
        data = self.take(length, thing)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.corrupt(f"{thing} {shown(repr(data))} is not UTF-8") from None

    def corrupt(self, fault: str) -> CorruptFile:
        return CorruptFile(f"{self.what}: {shown(self.subject)}: {fault}")


def _version(window: Window, what: str) -> tuple[int, bool]:
    """Return the version, and whether the file is little-endian, which is told by the version alone."""
    head = window.read(0, min(window.file.size, SNIFF_BYTES))
    if not head:
        raise CorruptFile(f"{what}: it is empty, an unfinished download most likely")
    if head[:4] != b"GGUF":
        old = "a ggml file from before GGUF: convert the model again" if head[:4] in _OLD else None
        raise UnknownFormat(f"{what}: not a GGUF file: {_it_is(old or describe_foreign(head), head)}")
    if len(head) < 24:
        raise CorruptFile(f"{what}: truncated: a GGUF file has at least 24 bytes, this one {len(head)}")
    version = int.from_bytes(head[4:8], "little")
    little = version & 0xFFFF != 0 or version == 0
    if not little:
        version = int.from_bytes(head[4:8], "big")
    if version == 3 or (version == 2 and little):
        return version, little
    hint = "convert the model again with a llama.cpp of today" if version < 2 else "2 and 3 are known here"
    order = "" if little else " of the big-endian kind, which begins with version 3"
    raise UnknownFormat(f"{what}: GGUF version {version}{order}: {hint}")


def _it_is(found: str | None, head: bytes) -> str:
    return f"it is {found}" if found else f"it starts with {head[:4]!r}"


def _believed(cursor: _Cursor, count: int, least: int, things: str) -> int:
    """Return `count`, which the rest of the file has room for, each of them taking at least `least` bytes."""
    if count * least > cursor.left:
        raise cursor.corrupt(f"truncated: {count:,} {things} are declared, {cursor.left:,} bytes are left")
    return count


def _read_metadata(cursor: _Cursor, count: int, arrays: bool) -> GgufMetadata:
    if count > _MAX_KEYS:
        raise cursor.corrupt(f"{count:,} keys, the limit is {_MAX_KEYS:,}")
    values: dict[str, Value] = {}
    for number in range(count):
        cursor.subject = f"key {number + 1} of {count}"
        key = cursor.name("its name")
        if not key:
            raise cursor.corrupt("its name is empty")
        if key in values:
            raise cursor.corrupt(f"duplicate key {shown(key)!r}")
        cursor.subject = key
        values[key] = _read_value(cursor, arrays)
    return GgufMetadata(values, what=cursor.what)


def _read_value(cursor: _Cursor, arrays: bool) -> Value:
    kind = _value_type(cursor, cursor.u32("the type of its value"))
    if kind is ValueType.ARRAY:
        return _read_array(cursor, arrays, 0)
    if kind is not ValueType.STRING:
        return Value(kind, _numbers(cursor, kind, 1, True)[0])
    length = cursor.u64("the length of its value")
    cursor.kept += length
    if not arrays and (length > _LONG_TEXT or cursor.kept > _TEXT_TOTAL):
        cursor.skip(length, "its value")
        return Value(kind, None)
    return Value(kind, cursor.take(length, "its value").decode("utf-8", "surrogateescape"))


def _value_type(cursor: _Cursor, number: int) -> ValueType:
    if number >= len(ValueType):
        raise cursor.corrupt(f"value type {number}, there are 0 to {len(ValueType) - 1}")
    return ValueType(number)


def _read_array(cursor: _Cursor, arrays: bool, depth: int) -> Value:
    element = _value_type(cursor, cursor.u32("the type of its elements"))
    count = cursor.u64("the number of its elements")
    cursor.need(count * element.size, f"an array of {count:,} {element.name}")
    if element is ValueType.STRING:
        return Value(ValueType.ARRAY, _texts(cursor, count, arrays), element)
    if element is not ValueType.ARRAY:
        return Value(ValueType.ARRAY, _numbers(cursor, element, count, arrays), element)
    cursor.arrays += count
    if depth or cursor.arrays > _MAX_ARRAYS:
        raise cursor.corrupt(f"arrays nest over 2 deep, or there are over {_MAX_ARRAYS:,} in others")
    inner = tuple(_read_array(cursor, arrays, depth + 1).value for _ in range(count))
    return Value(ValueType.ARRAY, inner if arrays else None, element)


def _numbers(cursor: _Cursor, kind: ValueType, count: int, keep: bool) -> Any:
    begin = cursor.at
    cursor.skip(count * kind.size, "its value")
    if kind is ValueType.BOOL:
        for at in range(begin, cursor.at, _BLOCK):
            if odd := cursor.window.read(at, min(_BLOCK, cursor.at - at)).translate(None, b"\0\1"):
                raise cursor.corrupt(f"a boolean must be 0 or 1, it is {odd[0]}")
    return numbers_of(cursor.window.read(begin, cursor.at - begin), kind, little=cursor.little) if keep else None


def _texts(cursor: _Cursor, count: int, keep: bool) -> Texts | None:
    """Pass over `count` strings, block by block; where `keep`, return them."""
    cursor.strings += count
    if cursor.strings > _MAX_STRINGS:
        raise cursor.corrupt(f"{cursor.strings:,} strings in arrays, the limit is {_MAX_STRINGS:,}")
    begin, starts = cursor.at, array("Q")
    length_at = struct.Struct("<Q" if cursor.little else ">Q").unpack_from
    while count:
        cursor.need(8, "the length of a string")
        block = cursor.window.read(cursor.at, min(_BLOCK, cursor.left))
        at, last, base = 0, len(block) - 8, cursor.at - begin
        while count and at <= last:
            if keep:
                starts.append(base + at)
            at += 8 + length_at(block, at)[0]
            count -= 1
        cursor.skip(at, "an array of strings")
    if not keep:
        return None
    starts.append(cursor.at - begin)
    return Texts(cursor.window.read(begin, cursor.at - begin), starts)


def _read_tensors(cursor: _Cursor, count: int) -> tuple[GgufTensor, ...]:
    if count > _MAX_TENSORS:
        raise cursor.corrupt(f"there are {count:,}, the limit is {_MAX_TENSORS:,}")
    tensors: dict[str, GgufTensor] = {}
    order = "<" if cursor.little else ">"
    tails = [struct.Struct(f"{order}{n}QIQ") for n in range(_MAX_DIMS + 1)]
    for number in range(count):
        cursor.subject = "tensor"
        name = cursor.name("its name")
        cursor.subject = f"tensor {number + 1} of {count}, {name!r}"
        rank = cursor.u32("the number of its dimensions")
        if rank > _MAX_DIMS:
            raise cursor.corrupt(f"{rank} dimensions, the limit is {_MAX_DIMS}")
        *dims, kind, offset = tails[rank].unpack(cursor.take(tails[rank].size, "its description"))
        if name in tensors:
            raise cursor.corrupt("a tensor of this name is there twice")
        if prod(dim or 1 for dim in dims) > _INT64_MAX:
            raise cursor.corrupt(f"dimensions {dims} overflow 64 bits")
        tensors[name] = GgufTensor(name, kind, tuple(reversed(dims)), offset)
    return tuple(tensors.values())


def _alignment(metadata: GgufMetadata, what: str) -> int:
    if "general.alignment" not in metadata:
        return 32
    kind, value, _ = metadata.typed("general.alignment")
    if kind is not ValueType.U32:
        raise CorruptFile(f"{what}: general.alignment must be U32, it is {kind.name}")
    if not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise CorruptFile(
            f"{what}: general.alignment is {value}, it must be a power of two from 8 to {_MAX_ALIGNMENT:,}"
        )
    return int(value)
