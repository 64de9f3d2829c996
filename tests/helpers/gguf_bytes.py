"""GGUF files written byte by byte, sound and broken, and the one call that catalogues them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensorferry.core.catalogue import Catalogue
from tensorferry.formats.gguf import GgufFormat
from tensorferry.storage.local import LocalStorage

NAME = "model.gguf"
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
U8, I8, U16, I16, U32, I32, FLOAT, BOOL, STRING, ARRAY, U64, I64, DOUBLE = range(13)
_CODES = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    FLOAT: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    DOUBLE: "d",
}


def s(text: str | bytes, order: str = "<") -> bytes:
    """Return a string as the format writes it: its length, then its bytes."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack(order + "Q", len(data)) + data


def kv(key: str | bytes, kind: int, value: object, order: str = "<") -> bytes:
    """Return a key with a value: a number, text, or bytes that are taken as they are."""
    if isinstance(value, bytes):
        body = value
    elif isinstance(value, str):
        body = s(value, order)
    else:
        body = struct.pack(order + _CODES[kind], value)
    return s(key, order) + struct.pack(order + "I", kind) + body


def array(element: int, values: Sequence[object], order: str = "<", *, count: int | None = None) -> bytes:
    """Return the value of an array; `count` is what it says of its length, if not the truth."""
    head = struct.pack(order + "IQ", element, len(values) if count is None else count)
    if element == STRING:
        return head + b"".join(s(v, order) for v in values if isinstance(v, str | bytes))
    if element == ARRAY:
        return head + b"".join(v for v in values if isinstance(v, bytes))
    return head + struct.pack(f"{order}{len(values)}{_CODES[element]}", *values)


@dataclass(frozen=True)
class T:
    """A tensor to be written. ne: dimensions as the file has them, fastest first. offset: if not where it belongs."""

    name: str | bytes = "t"
    ne: Sequence[int] = (2,)
    type: int = F32
    data: bytes = field(default=bytes(8), repr=False)
    offset: int | None = None
    rank: int | None = None


def gguf(
    tensors: Sequence[T] = (T(),),
    pairs: Sequence[bytes] = (),
    *,
    version: int = 3,
    order: str = "<",
    align: int = 32,
    tensor_count: int | None = None,
    kv_count: int | None = None,
    end_padding: bool = True,
) -> bytes:
    """Return a file; counts are what it says of itself, if not the truth. `align` is not written, only kept."""
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if kv_count is None else kv_count,
    )
    head = b"GGUF" + struct.pack(order + "IQQ", version, *counts) + b"".join(pairs)
    data = b""
    for t in tensors:
        data += bytes(-len(data) % align)
        offset = len(data) if t.offset is None else t.offset
        rank = len(t.ne) if t.rank is None else t.rank
        head += s(t.name, order) + struct.pack(f"{order}I{len(t.ne)}QIQ", rank, *t.ne, t.type, offset)
        data += t.data
    if end_padding:
        data += bytes(-len(data) % align)
    return head + (bytes(-len(head) % align) + data if data else b"")


def split_pairs(number: int, count: int, tensors: int) -> list[bytes]:
    """Return the keys that a part of a split model has."""
    return [
        kv("split.no", U16, number),
        kv("split.count", U16, count),
        kv("split.tensors.count", I32, tensors),
    ]


def write_split(folder: Path, parts: Sequence[Sequence[T]], stem: str = "m") -> list[Path]:
    """Write a split model, a file for each of `parts`; returns the paths."""
    total = sum(map(len, parts))
    paths = []
    for number, tensors in enumerate(parts):
        first = [kv("general.architecture", STRING, "llama")] if number == 0 else []
        path = folder / f"{stem}-{number + 1:05}-of-{len(parts):05}.gguf"
        path.write_bytes(gguf(tensors, first + split_pairs(number, len(parts), total)))
        paths.append(path)
    return paths


def catalogue(folder: Path, content: bytes) -> Catalogue:
    (folder / NAME).write_bytes(content)
    with LocalStorage(folder) as storage:
        return GgufFormat().catalogue(storage, storage.stat(NAME))
