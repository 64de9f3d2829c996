"""Headers of safetensors files: every rule of the format is checked before an entry is believed.

The format: https://github.com/huggingface/safetensors (8 bytes of length, a JSON header, then the bytes of the
tensors, end to end). No tensor data is read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from sys import getsizeof
from types import MappingProxyType
from typing import Any, NoReturn

from tensorferry.core.boxes import Shape
from tensorferry.core.catalogue import Catalogue, Chunk, Span, TensorEntry
from tensorferry.core.dtypes import DTYPES, DType, Kind
from tensorferry.errors import CorruptFile, UnsupportedDtype, shown
from tensorferry.formats.sniff import SNIFF_BYTES, describe_foreign
from tensorferry.formats.strict_json import JsonStream, json_kind, json_text, refuse_ambiguous
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import read_bytes

__all__ = ["MAX_HEADER", "MAX_RANK", "MAX_TENSORS", "SAFETENSORS_DTYPES", "SafetensorsFormat", "fills_bytes"]

MAX_HEADER = 100_000_000
"""Bytes that a header may take; the limit of the format."""

MAX_TENSORS = 131_072
"""Tensors that one file may hold, so that refusing any file stays cheap; the format itself names no limit."""

MAX_RANK = 64
"""Dimensions that a tensor may have; torch has no more. The format itself names no limit."""

SAFETENSORS_DTYPES: Mapping[str, DType] = MappingProxyType(
    {name: dtype for name, dtype in DTYPES.items() if dtype.kind is not Kind.PACKED and name not in ("C32", "C128")}
)
"""The types that the format defines, by the name that a header gives them."""

_INT64_MAX = 2**63 - 1
_WINDOW = 1 << 20
_ENTRY_LIMIT = 1 << 20  # characters of a name and its description
_METADATA_LIMIT = 4 << 20  # characters of one key and value of __metadata__
_METADATA_TOTAL = 32 << 20  # bytes of memory: one odd character makes all of a text take four times as much
_METADATA_COUNT = 1 << 16

_Placed = tuple[int, int, str, DType, Shape]
"""Begin and end in the data part, then name, type and shape: sorts into storage order."""


class SafetensorsFormat:
    """The `FileFormat` of ``.safetensors`` files.

    What refusing a file costs: the header is read in pieces of 1 MiB up to its first fault. Sound tensors before it
    cost some 5 µs and 250 bytes each, so that with `MAX_TENSORS` of them a fault is found within a second and 64 MiB.

    Beyond the rules of the format, a file may hold 131,072 tensors, a name with its description may take 1 MiB of
    header, a value of ``__metadata__`` 4 MiB, and all of ``__metadata__`` 32 MiB of memory in 65,536 keys.
    """

    name = "safetensors"

    def catalogue(self, storage: Storage, file: File) -> Catalogue:
        """Return what the header of `file` declares, in the order of the bytes. Reads nothing but the header.

        Raises CorruptFile for a file that breaks a rule of the format or is not safetensors at all, UnsupportedDtype
        for a type that the format does not have.
        """
        if file.size == 0:  # as a broken link or a pipe are listed too; `stat` has their own words
            file = storage.stat(file.path)
        what = f"{shown(file.path)} ({shown(storage.uri, 300)})"
        length = _header_length(storage, file, what)
        stream = JsonStream(_windows(storage, file, length, what), what=f"{what}: header")
        placed, metadata = _read_members(stream, what)
        stream.end()
        placed.sort()
        _check_layout(placed, length, file.size, what)
        return Catalogue(
            _entries(placed, file.path, 8 + length), format=self.name, files=(file.path,), metadata=metadata
        )


def _header_length(storage: Storage, file: File, what: str) -> int:
    """Return the length that the file declares for its header, proven against its size and the format's limit."""
    if file.size < 8:
        empty = "it is empty, an unfinished download most likely; " if not file.size else ""
        raise CorruptFile(f"{what}: {empty}a safetensors file has at least 8 bytes, this one {file.size}")
    (length,) = struct.unpack("<Q", read_bytes(storage, file.path, 0, 8))
    if length > MAX_HEADER:
        raise _no_header(storage, file, what, f"header of {length} bytes, the limit of the format is {MAX_HEADER}")
    if length > file.size - 8:
        short = f"truncated: header declares {length} bytes, which ends at {8 + length}, file has {file.size}"
        raise _no_header(storage, file, what, short)
    if not length:
        raise _no_header(storage, file, what, "its header is empty")
    return int(length)


def _no_header(storage: Storage, file: File, what: str, fault: str) -> CorruptFile:
    """Return the error for a file that has no header where one belongs; it may be of quite another sort."""
    head = read_bytes(storage, file.path, 0, min(file.size, SNIFF_BYTES))
    real = None if head[8:9] == b"{" else describe_foreign(head)
    return CorruptFile(f"{what}: this is {real} ({fault})" if real else f"{what}: {fault}")


def _windows(storage: Storage, file: File, length: int, what: str) -> Iterator[bytes]:
    for offset in range(0, length, _WINDOW):
        window = read_bytes(storage, file.path, 8 + offset, min(_WINDOW, length - offset))
        if not offset and window[:1] != b"{":
            raise _no_header(storage, file, what, f"the header must start with '{{', it starts with {window[:1]!r}")
        yield window


def _read_members(stream: JsonStream, what: str) -> tuple[list[_Placed], dict[str, str]]:
    """Return the tensors in the order of the header, and the metadata."""
    placed: list[_Placed] = []
    metadata: dict[str, str] = {}
    names: set[str] = set()
    for name, value in stream.members(limit=_ENTRY_LIMIT, descend="__metadata__"):
        if name in names:
            raise CorruptFile(f"{what}: duplicate key {shown(name)!r} in the header")
        names.add(name)
        if name == "__metadata__":
            metadata = _read_metadata(stream, what)
        else:
            placed.append(_placed(name, value, what))
            if len(placed) > MAX_TENSORS:
                raise CorruptFile(f"{what}: over {MAX_TENSORS} tensors, the limit for one file: split it into shards")
    return placed, metadata


def _read_metadata(stream: JsonStream, what: str) -> dict[str, str]:
    metadata: dict[str, str] = {}
    total = 0
    for key, value in stream.members(limit=_METADATA_LIMIT):
        if key in metadata:
            raise CorruptFile(f"{what}: duplicate key {shown(key)!r} in __metadata__")
        if type(value) is not str:
            raise CorruptFile(f"{what}: __metadata__ maps strings to strings, {shown(key)!r} is {json_kind(value)}")
        metadata[key] = value
        total += getsizeof(key) + getsizeof(value)
        if total > _METADATA_TOTAL or len(metadata) > _METADATA_COUNT:
            raise CorruptFile(
                f"{what}: __metadata__ takes over {_METADATA_TOTAL} bytes or has over {_METADATA_COUNT} keys"
            )
    return metadata


def _placed(name: str, value: Any, what: str) -> _Placed:
    """Return the tensor that one member of the header declares, checked by itself; this is the inner loop."""
    if type(value) is tuple and len(value) == 3:
        (first, dtype_name), (second, dims), (third, offsets) = value
        if first != "dtype" or second != "shape" or third != "data_offsets":
            dtype_name, dims, offsets = _fields(name, value, what)
    else:
        dtype_name, dims, offsets = _fields(name, value, what)
    dtype = SAFETENSORS_DTYPES.get(dtype_name) if type(dtype_name) is str else None
    if dtype is None:
        _refuse_dtype(name, dtype_name, what)
    nbytes = _nbytes(name, dtype, dims, what)
    if type(offsets) is not list or len(offsets) != 2:
        _refuse_offsets(name, offsets, what)
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        _refuse_offsets(name, offsets, what)
    if end - begin != nbytes:
        raise CorruptFile(
            f"{what}: tensor {shown(name)!r} is {dtype} of shape {dims}, which takes {nbytes} bytes, "
            f"but its data_offsets {shown(str(offsets))} span {end - begin}"
        )
    return begin, end, name, dtype, tuple(dims)


def _fields(name: str, value: Any, what: str) -> tuple[Any, Any, Any]:
    """Return dtype, shape and data_offsets of an entry that has them in another order, among others, or not at all."""
    if type(value) is not tuple:
        raise CorruptFile(
            f"{what}: {shown(name)!r} must be an object with dtype, shape and data_offsets, it is {json_kind(value)}"
        )
    refuse_ambiguous(((name, value),), what=f"{what}: header, {shown(name)!r}")
    fields: dict[str, Any] = dict(value)
    if missing := [key for key in ("dtype", "shape", "data_offsets") if key not in fields]:
        raise CorruptFile(f"{what}: tensor {shown(name)!r} has no {' and no '.join(missing)}")
    return fields["dtype"], fields["shape"], fields["data_offsets"]


def _nbytes(name: str, dtype: DType, dims: Any, what: str) -> int:
    """Return the bytes that a tensor takes, after checking that `dims` are the shape of one."""
    if type(dims) is not list or len(dims) > MAX_RANK:
        _refuse_shape(name, dims, what)
    for dim in dims:
        if type(dim) is not int or not 0 <= dim <= _INT64_MAX:
            _refuse_shape(name, dims, what)
    nbytes = prod(dims) * dtype.block_bytes // dtype.block
    # Of an empty tensor the strides still have to fit.
    if not 0 < nbytes <= _INT64_MAX and prod(dim or 1 for dim in dims) * dtype.block_bytes > _INT64_MAX * dtype.block:
        raise CorruptFile(f"{what}: tensor {shown(name)!r}: shape {dims} overflows 64 bits")
    if not fills_bytes(dtype, dims):
        need = "an even last dimension" if dtype.name == "F4" else f"a multiple of {dtype.block} elements"
        raise CorruptFile(
            f"{what}: tensor {shown(name)!r}: {dtype} of shape {dims} fills no whole bytes; it needs {need}"
        )
    return nbytes


def fills_bytes(dtype: DType, shape: Sequence[int]) -> bool:
    """Whether a tensor ends on a byte; the rows of F4, two elements to a byte, have to as well."""
    if dtype.block == 1:
        return True
    return prod(shape) % dtype.block == 0 and (dtype.name != "F4" or (len(shape) > 0 and shape[-1] % 2 == 0))


def _refuse_dtype(name: str, found: Any, what: str) -> NoReturn:
    if type(found) is not str:
        raise CorruptFile(f"{what}: tensor {shown(name)!r}: dtype must be a string, it is {json_kind(found)}")
    raise UnsupportedDtype(
        f"{what}: tensor {shown(name)!r} has the dtype {shown(found)!r}, which safetensors does not define; "
        f"it has {', '.join(SAFETENSORS_DTYPES)}"
    )


def _refuse_shape(name: str, dims: Any, what: str) -> NoReturn:
    if type(dims) is list and len(dims) > MAX_RANK:
        raise CorruptFile(f"{what}: tensor {shown(name)!r} has {len(dims)} dimensions, the limit is {MAX_RANK}")
    raise CorruptFile(
        f"{what}: tensor {shown(name)!r}: shape must be a list of integers from 0 to 2^63 - 1, "
        f"it is {shown(json_text(dims))}"
    )


def _refuse_offsets(name: str, offsets: Any, what: str) -> NoReturn:
    raise CorruptFile(
        f"{what}: tensor {shown(name)!r}: data_offsets must be two integers, begin and end, with 0 <= begin <= end, "
        f"they are {shown(json_text(offsets))}"
    )


def _check_layout(placed: Sequence[_Placed], length: int, size: int, what: str) -> None:
    """Raise unless the tensors, sorted by place, fill the `size - 8 - length` bytes after the header exactly."""
    at, before = 0, ""
    for begin, end, name, _, _ in placed:
        if begin != at:
            raise CorruptFile(f"{what}: {_misplaced(before, at, name, begin, end)}")
        at, before = end, name
    wanted = 8 + length + at
    if wanted > size:
        hit = next(name for _, end, name, _, _ in placed if 8 + length + end > size)
        raise CorruptFile(
            f"{what}: truncated: header declares {wanted} bytes, file has {size}, {wanted - size} are missing; "
            f"first tensor hit: {shown(hit)!r}; download it again"
        )
    if wanted < size:
        raise CorruptFile(
            f"{what}: {size - wanted} bytes at its end belong to no tensor: header declares {wanted} bytes, "
            f"file has {size}"
        )


def _misplaced(before: str, at: int, name: str, begin: int, end: int) -> str:
    where = f"{shown(name)!r} (bytes {begin} to {end} of the data)"
    if begin > at:
        after = f" after {shown(before)!r}" if before or at else ""
        return f"hole: bytes {at} to {begin} of the data{after} belong to no tensor; next is {where}"
    return f"overlap: {where} begins before {shown(before)!r} ends, at {at}"


def _entries(placed: Iterable[_Placed], file: str, base: int) -> Iterator[TensorEntry]:
    for begin, end, name, dtype, shape in placed:
        yield TensorEntry(name, dtype, shape, (Chunk(None, Span(file, base + begin, end - begin)),))
