"""Staged bytes seen as tensors, and the memory of a tensor seen as bytes. What copies says so."""

from __future__ import annotations

import ctypes
from functools import cache
from math import prod
from typing import Any

import torch

from tensorferry.core.boxes import Region, Shape
from tensorferry.core.dtypes import DType
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_elements

__all__ = ["bytes_of", "return_free_memory", "strided_view", "view_region"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes; valid while the tensor lives."""
    n = tensor.numel() * tensor.element_size()
    if n == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * n).from_address(tensor.data_ptr())).cast("B")


def strided_view(staged: torch.Tensor, offset: int, dtype: DType, shape: Shape, strides: Shape) -> torch.Tensor:
    """Return elements lying in staged bytes as a tensor of `shape`, which aliases `staged` where it can.

    staged: uint8, contiguous. offset: bytes to the first element. shape and strides: in blocks of `dtype`.
    Bytes that start on an odd address for their type are copied to an aligned one.
    """
    kind, k = torch_dtype(dtype), torch_elements(dtype)
    blocks = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if prod(shape) else 0
    raw = staged[offset : offset + blocks * dtype.block_bytes]
    if raw.data_ptr() % kind.itemsize or raw.storage_offset() % kind.itemsize:
        raw = raw.clone()
    typed = raw.view(kind)
    if k == 1:
        return typed.as_strided(shape, strides)
    bytewise = typed.as_strided((*shape, k), (*(s * k for s in strides), 1))
    return bytewise.reshape((*shape[:-1], shape[-1] * k)) if shape else bytewise


def view_region(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the part `region` of `tensor` as a view that can be written to.

    region: counted in torch elements. Raises RuntimeError where the reshape is no view of a strided tensor.
    """
    if tuple(tensor.shape) != region.view:
        tensor = tensor.view(region.view)
    return tensor if region.is_whole else tensor[region.box.slices]


def return_free_memory() -> None:
    """Hand freed memory back to the system where the C library keeps it (glibc, up to 32 MiB a piece); else nothing."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:  # a function of the C library
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
