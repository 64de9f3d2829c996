"""Writes safetensors files, whole or not at all. The bytes come from the caller; nothing is converted here."""

from __future__ import annotations

import json
import os
import secrets
import stat as modes
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tensorferry.core.boxes import Shape
from tensorferry.core.dtypes import DType
from tensorferry.errors import FormatError, shown
from tensorferry.formats.safetensors import MAX_HEADER, SAFETENSORS_DTYPES, fills_bytes

__all__ = ["NewTensor", "write_safetensors"]


class NewTensor(NamedTuple):
    """A tensor to write: row-major, little-endian bytes in `chunks` that are cut anywhere and taken one at a time."""

    dtype: DType
    shape: Shape
    chunks: Iterable[bytes | bytearray | memoryview]


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, NewTensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors` to `path` as one safetensors file, in place of what is there.

    The file is written beside, under a name that begins with a dot, flushed to the disk and renamed, so that `path` is
    always the old file or the new one. It keeps the permissions of the old file; a new one gets those of the umask. A
    link at `path` is replaced, not followed. Wider types come first, then names in order, so that every tensor is
    aligned; `chunks` are asked for in that order.

    Raises FormatError, with `path` untouched, if a tensor does not fit the format or its chunks are not as long as its
    shape says; OSError if the disk refuses.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.bits, name))
    header = _header({name: tensors[name] for name in order}, metadata)
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    out = beside.open("xb")
    try:
        with out:
            _keep_mode(out.fileno(), target)
            out.write(header)
            for name in order:
                _write_chunks(out, name, tensors[name])
            out.flush()
            os.fsync(out.fileno())
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _header(tensors: Mapping[str, NewTensor], metadata: Mapping[str, str] | None) -> bytes:
    fields: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape, _) in tensors.items():
        _refuse_unwritable(name, dtype, shape)
        end = at + dtype.nbytes(shape)
        fields[name] = {"dtype": dtype.name, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"lone surrogate in a name or in the metadata: {shown(error.object)!r}") from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise FormatError(
            f"the header takes {len(text)} bytes, the limit of the format is {MAX_HEADER}: use more files"
        )
    return struct.pack("<Q", len(text)) + text


def _refuse_unwritable(name: str, dtype: DType, shape: Shape) -> None:
    if name == "__metadata__":
        raise FormatError("a tensor cannot be called '__metadata__' in a safetensors file")
    if SAFETENSORS_DTYPES.get(dtype.name) != dtype:
        raise FormatError(f"tensor {shown(name)!r}: safetensors has no dtype {dtype}")
    if any(dim < 0 for dim in shape) or not fills_bytes(dtype, shape):
        raise FormatError(f"tensor {shown(name)!r}: {dtype} of shape {list(shape)} fills no whole bytes")


def _write_chunks(out: BinaryIO, name: str, tensor: NewTensor) -> None:
    wanted, written = tensor.dtype.nbytes(tensor.shape), 0
    for chunk in tensor.chunks:
        written += memoryview(chunk).nbytes
        if written > wanted:
            break
        out.write(chunk)
    if written != wanted:
        found = f"over {wanted}" if written > wanted else str(written)
        raise FormatError(f"tensor {shown(name)!r} takes {wanted} bytes, its chunks have {found}; nothing was written")


def _keep_mode(fd: int, target: Path) -> None:
    with suppress(FileNotFoundError):
        old = target.lstat()
        if modes.S_ISREG(old.st_mode):
            os.fchmod(fd, modes.S_IMODE(old.st_mode))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
