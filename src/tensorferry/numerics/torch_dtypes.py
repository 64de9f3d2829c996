"""Which torch dtype stands for which element type, and how stored blocks become torch elements.

Looked up when needed, so that a torch without some type imports and fails only for a file that has it.
"""

from __future__ import annotations

from functools import cache

import torch

from tensorferry.core.boxes import Shape
from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.errors import UnsupportedDtype

__all__ = ["dtype_of", "logical_shape", "torch_dtype", "torch_elements", "torch_shape"]

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F4": "float4_e2m1fn_x2", "F6_E2M3": "uint8", "F6_E3M2": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C32": "complex32", "C64": "complex64", "C128": "complex128",
}  # fmt: skip


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch dtype of `dtype`'s blocks; types that torch lacks come as their bytes (uint8).

    Raises UnsupportedDtype where this version of torch does not have it.
    """
    name = _NAMES.get(dtype.name, "uint8")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedDtype(f"{dtype} needs torch.{name}, which torch {torch.__version__} does not have: upgrade it")
    return found


@cache
def torch_elements(dtype: DType) -> int:
    """Return how many torch elements one block of `dtype` is: 1, or its bytes where it comes as bytes."""
    return dtype.block_bytes // torch_dtype(dtype).itemsize


@cache
def _by_torch() -> dict[torch.dtype, DType]:
    known = {}
    for name, torch_name in reversed(_NAMES.items()):
        found = getattr(torch, torch_name, None)
        if isinstance(found, torch.dtype) and (torch_name != "uint8" or name == "U8"):
            known[found] = DTYPES[name]
    return known


def dtype_of(dtype: torch.dtype) -> DType:
    """Return the element type that a torch dtype holds; raises UnsupportedDtype for quantized ones."""
    try:
        return _by_torch()[dtype]
    except KeyError:
        raise UnsupportedDtype(f"parameters of {dtype} cannot be loaded: no checkpoint format has that type") from None


def torch_shape(dtype: DType, shape: Shape) -> Shape:
    """Return the shape of the torch tensor that holds a tensor of `shape`, whose last dimension is in elements.

    F4 comes two to a torch element; types without a torch dtype come as bytes, flat where rows are no whole blocks.
    """
    n, k = dtype.block, torch_elements(dtype)
    if n == k == 1:
        return shape
    if not shape or shape[-1] % n:
        return (dtype.nbytes(shape) // torch_dtype(dtype).itemsize,)
    return (*shape[:-1], shape[-1] // n * k)


def logical_shape(dtype: DType, shape: Shape) -> Shape:
    """Return the shape in elements of a torch tensor of `shape`; the inverse of `torch_shape`."""
    if dtype.block == 1 or not shape:
        return shape
    return (*shape[:-1], shape[-1] // torch_elements(dtype) * dtype.block)
