"""Torch files for tests: written by torch or byte by byte, and read back through our catalogue."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.formats.torch_file import TorchFileFormat
from tensorferry.storage.local import LocalStorage

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C32": torch.complex32,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
"""Every type that torch and a catalogue count alike; F4, which torch counts in bytes, is not among them."""


def saved(value: Any, **options: Any) -> bytes:
    """Return the bytes that torch.save writes for `value`."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def legacy(value: Any, **options: Any) -> bytes:
    """Return the bytes that torch.save wrote before 1.6."""
    return saved(value, _use_new_zipfile_serialization=False, **options)


def catalogue_of(path: Path) -> Catalogue:
    """Return our catalogue of the torch file at `path`."""
    with LocalStorage(path.parent) as storage:
        return TorchFileFormat().catalogue(storage, storage.stat(path.name))


def catalogue_of_bytes(folder: Path, data: bytes, name: str = "model.pt") -> Catalogue:
    """Write `data` to `folder` and return our catalogue of it."""
    (folder / name).write_bytes(data)
    return catalogue_of(folder / name)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the torch file at `path`, read through our catalogue."""
    with LocalStorage(path.parent) as storage:
        catalogue = TorchFileFormat().catalogue(storage, storage.stat(path.name))
        return {name: read_entry(storage, entry) for name, entry in catalogue.items()}


def read_entry(storage: LocalStorage, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor of an entry: its span, seen through its shape and strides."""
    (chunk,) = entry.chunks
    assert chunk.span is not None
    dtype = TORCH_DTYPES[entry.dtype.name]
    if not chunk.span.length:
        return torch.empty(entry.shape, dtype=dtype)
    data = bytearray(chunk.span.length)
    storage.read_into(chunk.span.file, chunk.span.offset, memoryview(data))
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    return flat.as_strided(entry.shape, chunk.strides) if chunk.strides else flat.reshape(entry.shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and equal bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def zipped(records: Mapping[str, bytes], root: str = "archive", method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive of `records` in one folder, as Python writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(f"{root}/{name}" if root else name, data)
    return buffer.getvalue()


# Pickles, opcode by opcode. What these return is concatenated and framed by `pickled`.


def pickled(*pieces: bytes) -> bytes:
    """Return a pickle of protocol 2 with these opcodes."""
    return b"\x80\2" + b"".join(pieces) + b"."


def text(value: str) -> bytes:
    """BINUNICODE."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """LONG1."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def a_global(name: str) -> bytes:
    """GLOBAL; the last dot parts the module from the name."""
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def a_tuple(*items: bytes) -> bytes:
    """MARK … TUPLE."""
    return b"(" + b"".join(items) + b"t"


def call(name: str, *args: bytes) -> bytes:
    """GLOBAL, a tuple, REDUCE."""
    return a_global(name) + a_tuple(*args) + b"R"


def a_dict(**items: bytes) -> bytes:
    """EMPTY_DICT, MARK … SETITEMS."""
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def a_storage(
    numel: int = 4,
    *,
    key: str = "0",
    kind: str = "torch.FloatStorage",
    location: str = "cpu",
    view: bytes | None = None,
) -> bytes:
    """The persistent id of a storage; `view` makes it that of a legacy file."""
    fields = [text("storage"), a_global(kind), text(key), text(location), number(numel)]
    return a_tuple(*fields, *([] if view is None else [view])) + b"Q"


EMPTY_HOOKS = call("collections.OrderedDict")


def a_tensor(
    shape: tuple[int, ...] = (4,),
    strides: tuple[int, ...] = (1,),
    offset: int = 0,
    *,
    storage: bytes | None = None,
    hooks: bytes = EMPTY_HOOKS,
    flags: bytes = b"",
) -> bytes:
    """A call of _rebuild_tensor_v2."""
    return call(
        "torch._utils._rebuild_tensor_v2",
        storage or a_storage(),
        number(offset),
        a_tuple(*map(number, shape)),
        a_tuple(*map(number, strides)),
        b"\x89",
        hooks,
        flags,
    )


def zip_file(pickle: bytes, *, storage: bytes = b"\1" * 16, **records: bytes) -> bytes:
    """A zip torch file with one storage, of four float32 if not said otherwise."""
    return zipped({"data.pkl": pickle, "data/0": storage, "version": b"3\n", **records})


def legacy_file(
    pickle: bytes,
    *,
    keys: bytes | None = None,
    tail: bytes = struct.pack("<Q", 4) + b"\1" * 16,
    preamble: bytes | None = None,
) -> bytes:
    """A legacy torch file with one storage, of four float32 if not said otherwise."""
    magic = pickled(b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19")
    system = pickled(a_dict(little_endian=b"\x88"))
    before = magic + pickled(number(1001)) + system if preamble is None else preamble
    return before + pickle + (pickled(b"](" + text("0") + b"e") if keys is None else keys) + tail
