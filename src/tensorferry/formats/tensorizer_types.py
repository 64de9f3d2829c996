"""The element types of Tensorizer files: their names there, and ours. What torch calls them stands in their names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tensorferry.core.boxes import Shape
from tensorferry.core.dtypes import DTYPES, DType

__all__ = ["TENSORIZER_DTYPES", "dtype_text", "is_opaque", "logical_shape", "stored_shape"]

_NUMPY = {
    "BOOL": "|b1", "U8": "|u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I8": "|i1", "I16": "<i2", "I32": "<i4",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "C128": "<c16",
}  # fmt: skip

_OPAQUE = {
    "BF16": "<V2\0torch.bfloat16", "C32": "<V4\0torch.complex32",
    "F8_E4M3": "|V1\0torch.float8_e4m3fn", "F8_E4M3FNUZ": "|V1\0torch.float8_e4m3fnuz",
    "F8_E5M2": "|V1\0torch.float8_e5m2", "F8_E5M2FNUZ": "|V1\0torch.float8_e5m2fnuz",
    "F8_E8M0": "|V1\0torch.float8_e8m0fnu", "F4": "|V1\0torch.float4_e2m1fn_x2",
}  # fmt: skip
"""Types that NumPy lacks: as void of their size, a NUL, and their name in torch."""

_TEXTS = {**_NUMPY, **_OPAQUE}

TENSORIZER_DTYPES: Mapping[str, DType] = MappingProxyType({text: DTYPES[name] for name, text in _TEXTS.items()})
"""Every type that is read and written, by its text in the file."""


def dtype_text(dtype: DType) -> str | None:
    """Return what the file calls `dtype`, or None where the format has no such type."""
    return _TEXTS.get(dtype.name) if DTYPES.get(dtype.name) == dtype else None


def is_opaque(dtype: DType) -> bool:
    """Whether a file with `dtype` has to be of version 2 or later, because NumPy lacks the type."""
    return dtype.name in _OPAQUE


def logical_shape(dtype: DType, shape: Shape) -> Shape | None:
    """Return the shape in elements of a tensor whose `shape` in the file counts blocks; None where it has none."""
    if dtype.block == 1:
        return shape
    return (*shape[:-1], shape[-1] * dtype.block) if shape else None


def stored_shape(dtype: DType, shape: Shape) -> Shape | None:
    """Return what the file has as the shape of a tensor of `shape`; the inverse of `logical_shape`."""
    if dtype.block == 1:
        return shape
    return (*shape[:-1], shape[-1] // dtype.block) if shape and not shape[-1] % dtype.block else None
