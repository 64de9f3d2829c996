"""The tensorizer library as tests use it: what it writes, what it reads, and tensors of every type that it knows.

It looks for libsodium on the machine; where that has none, it is given the one that the wheels of pyzmq bring.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import raw
from tensorferry.formats.writing import NewTensor
from tensorferry.numerics.torch_dtypes import dtype_of, logical_shape

__all__ = ["SAMPLES", "key_file", "library", "needs_sodium", "new_tensor", "read_by_library", "write_by_library"]

_TYPES = (
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float16",
    "float32", "float64", "complex32", "complex64", "complex128", "bool", "uint8", "uint16", "uint32", "uint64", "int8",
    "int16", "int32", "int64", "float4_e2m1fn_x2",
)  # fmt: skip


def _of_type(name: str) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, name)
    bits = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) * 37 % (2 if name == "bool" else 251)
    return bits.view(dtype).view(2, 3)


SAMPLES: Mapping[str, torch.Tensor] = {
    **{name: _of_type(name) for name in _TYPES},
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "boxes": torch.arange(1_200_000, dtype=torch.float32).view(1200, 1000),  # more than two of the library's 2 MiB
}
"""A tensor of every type; a scalar, an empty one, and one that takes several boxes when it is encrypted."""


def library() -> Any:
    """Return the module `tensorizer`."""
    found = ctypes.util.find_library
    if not _has_sodium() and (bundled := _bundled_sodium()) is not None:
        ctypes.util.find_library = lambda name: bundled if name == "sodium" else found(name)
    try:
        return importlib.import_module("tensorizer")
    finally:
        ctypes.util.find_library = found


def _has_sodium() -> bool:
    if ctypes.util.find_library("sodium") is not None:
        return True
    with suppress(OSError):
        return ctypes.CDLL("libsodium.so.23") is not None
    return False


def _bundled_sodium() -> str | None:
    with suppress(PackageNotFoundError):
        return next((str(f.locate()) for f in files("pyzmq") or () if f.name.startswith("libsodium")), None)
    return None


needs_sodium = pytest.mark.skipif(
    not (library() and importlib.import_module("tensorizer._crypt").available),
    reason="tensorizer finds no libsodium, neither the system's nor that of pyzmq",
)


def write_by_library(path: Path, tensors: Any, *, encryption: Any = None) -> Path:
    """Write a state dict, or a module, with the library."""
    serializer = library().TensorSerializer(str(path), encryption=encryption)
    if isinstance(tensors, torch.nn.Module):
        serializer.write_module(tensors)
    else:
        serializer.write_state_dict(tensors)
    serializer.close()
    return path


def read_by_library(path: Path, *, lazy: bool = False, encryption: Any = None) -> dict[str, torch.Tensor]:
    """Return all tensors that the library reads, its hashes verified, by three readers."""
    kind = library().TensorDeserializer
    with kind(str(path), "cpu", lazy_load=lazy, verify_hash=True, num_readers=3, encryption=encryption) as read:
        return {name: tensor.detach() for name, tensor in read.items()}


def key_file(path: Path, key: bytes) -> Path:
    path.write_bytes(key)
    return path


def new_tensor(tensor: torch.Tensor) -> NewTensor:
    """Return `tensor` as something to write, its bytes in uneven pieces."""
    dtype, data = dtype_of(tensor.dtype), raw(tensor)
    pieces = [data[:7], data[7:1_000_000], data[1_000_000:]]
    return NewTensor(dtype, logical_shape(dtype, tuple(tensor.shape)), pieces)
