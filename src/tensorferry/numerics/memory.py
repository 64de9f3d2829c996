"""Staged bytes seen as tensors, and the memory of a tensor seen as bytes. What copies says so."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache
from math import prod
from typing import Any

import torch

from tensorferry.core.boxes import Region, Shape, strides_of
from tensorferry.core.dtypes import DType
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_elements, torch_shape

__all__ = ["bytes_of", "empty_at", "return_free_memory", "strided_view", "tensor_over", "view_region", "zeros_of"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes; valid while the tensor lives."""
    n = tensor.numel() * tensor.element_size()
    if n == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * n).from_address(tensor.data_ptr())).cast("B")


def zeros_of(dtype: DType, shape: Shape, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a tensor of zeros that a tensor of a checkpoint is like, of that `dtype` and `shape` there.

    Of types of a byte or less as bytes: torch does not fill all of these.
    """
    kind, shape = torch_dtype(dtype), torch_shape(dtype, shape)
    if kind.itemsize == 1:
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(kind)
    return torch.zeros(shape, dtype=kind, device=device)


def tensor_over(memory: Any, offset: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes from `offset` of writable memory, anything with the buffer protocol, as a tensor.

    It keeps the memory alive. Its storage has just its bytes and is its own, as that of ``torch.empty``, but cannot be
    resized.
    """
    with torch.inference_mode(False):
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=prod(shape) * dtype.itemsize, offset=offset)
        empty: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu")
        return empty.set_(raw.untyped_storage(), 0, shape, strides_of(shape))


def empty_at(begin: int, shape: Shape, dtype: torch.dtype, huge_pages: bool = False) -> torch.Tensor:
    """Return an uninitialized CPU tensor whose address equals `begin` modulo the size of a page.

    So it can be read directly from a file in which it lies at `begin`, a multiple of its element size. See
    `tensor_over`; its memory goes back to the system when it is freed. huge_pages: ask for huge pages.
    """
    lead, nbytes = begin % mmap.PAGESIZE, prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, lead + nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return tensor_over(memory, lead, shape, dtype)


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
