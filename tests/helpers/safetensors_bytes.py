"""Safetensors files written byte by byte, sound and broken, and the one call that catalogues them."""

from __future__ import annotations

import struct
from pathlib import Path

from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import TensorferryError
from tensorferry.formats.safetensors import SafetensorsFormat
from tensorferry.storage.local import LocalStorage

NAME = "model.safetensors"
EMPTY = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


def st_file(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file with this header text; `length` is what it says of the header, if not the truth."""
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def header_and_values(file: bytes) -> tuple[bytes, bytes]:
    """Return the header, without the spaces that it may end with, and what follows it."""
    end = 8 + int.from_bytes(file[:8], "little")
    return file[8:end].rstrip(b" "), file[end:]


def entry(dtype: str = "U8", shape: str = "[1]", offsets: str = "[0,1]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def one(dtype: str = "U8", shape: str = "[1]", offsets: str = "[0,1]", size: int = 1) -> bytes:
    """Return a file with the tensor `t` and `size` bytes of data."""
    return st_file(f'{{"t":{entry(dtype, shape, offsets)}}}', b"\1" * size)


def with_extra(value: str) -> bytes:
    """Return a file whose one entry has a further key: legal, and where odd JSON could hide."""
    return st_file(f'{{"t":{{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{value}}}}}', b"\1")


def with_metadata(text: str) -> bytes:
    return st_file(f'{{"__metadata__":{text},"t":{entry()}}}', b"\1")


def two(first: str, second: str, size: int) -> bytes:
    return st_file(f'{{"a":{first},"b":{second}}}', b"\1" * size)


GOOD = one()


def catalogue(folder: Path, content: bytes) -> Catalogue:
    (folder / NAME).write_bytes(content)
    with LocalStorage(folder) as storage:
        return SafetensorsFormat().catalogue(storage, storage.stat(NAME))


def attempt(folder: Path, content: bytes) -> Catalogue | TensorferryError:
    """Return the catalogue of a file with `content`, or the error that refused it."""
    try:
        return catalogue(folder, content)
    except TensorferryError as refusal:
        return refusal
