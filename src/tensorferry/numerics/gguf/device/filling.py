"""From packed blocks on a device to a parameter there: one kernel for all types, which asks theirs for each element."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module

import torch
import triton
import triton.language as tl

from tensorferry.core.dtypes import DType
from tensorferry.numerics.casts import Loss, counted_on_device
from tensorferry.numerics.gguf.device.bits import brain, unspecialized
from tensorferry.numerics.gguf.families import FAMILY
from tensorferry.numerics.gguf.grids import GRIDS
from tensorferry.numerics.gguf.tables import FP4, NONLINEAR

__all__ = ["OPTIONS", "elements_of", "fill", "kernel"]

OPTIONS = {"enable_fp_fusion": False}
"""What the kernel is compiled with: a product and a sum are rounded apart, as in C."""

_AT_ONCE = 1 << 30
"""Elements of one launch: places among them are counted in 32 bits."""

_SIZE = 1024
"""Elements of one program of the kernel."""

_LAUNCHING = threading.Lock()
"""Held while kernels are compiled and started, which Triton does for one thread at a time; not while they run."""


@unspecialized("row", "row_stride", "total")
def kernel(
    packed: tl.tensor,
    into: tl.tensor,
    table: tl.tensor,
    lost: tl.tensor,
    row: tl.tensor,
    row_stride: tl.tensor,
    stride: tl.tensor,
    total: tl.tensor,
    element: tl.constexpr,
    block: tl.constexpr,
    block_bytes: tl.constexpr,
    kind: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Fill `total` elements from blocks that lie one after the other.

    into: float32, float16, or int16 for the bits of bfloat16; rows of `row` elements that lie `stride` apart, and they
    `row_stride`. lost: int32, to which is added how many elements overflow float16, and behind that how many underflow.
    """
    at = tl.program_id(0) * size + tl.arange(0, size)
    there = at < total
    at = tl.minimum(at, total - 1)
    values = element(packed + (at // block).to(tl.int64) * block_bytes, at % block, table)
    where = into + (at // row).to(tl.int64) * row_stride + (at % row).to(tl.int64) * stride
    if kind == "bfloat16":
        tl.store(where, brain(values), mask=there)
    elif kind == "float16":
        rounded = values.to(tl.float16)
        tl.store(where, rounded, mask=there)
        had, got = tl.abs(values), tl.abs(rounded.to(tl.float32))
        over, under = (had < float("inf")) & (got == float("inf")) & there, (had > 0.0) & (got == 0.0) & there
        tl.atomic_add(lost, tl.sum(over.to(tl.int32), axis=0))
        tl.atomic_add(lost + 1, tl.sum(under.to(tl.int32), axis=0))
    else:
        tl.store(where, values, mask=there)


def fill(dtype: DType, packed: torch.Tensor, into: torch.Tensor) -> Loss:
    """Put the numbers of `packed` into `into`, rounded once to its type; return what float16 spoiled.

    packed: uint8, whole blocks in order, on the device of `into`. into: float32, bfloat16 or float16, its last
    dimension whole blocks, with any strides. Waits for the device only to know a loss, so for float16 only, and not
    inside `counting_later`.
    """
    packed, into = packed.contiguous().view(-1), into.detach()
    lost = torch.zeros(2, dtype=torch.int32, device=into.device) if into.dtype == torch.float16 else None
    at = 0
    with _LAUNCHING, _on(into.device):
        for rows in _rows(into, dtype.block):
            _launch(dtype, packed[at:], rows, lost)
            at += rows.numel() // dtype.block * dtype.block_bytes
    return Loss() if lost is None else counted_on_device(lost)


def _rows(into: torch.Tensor, block: int) -> Iterator[torch.Tensor]:
    """Yield the parts of a tensor, in order, as matrices of so few elements that one launch counts them."""
    if not into.numel():
        return
    if into.is_contiguous():
        into = into.view(-1, block)
    if into.dim() > 2:
        for part in into:
            yield from _rows(part, block)
        return
    matrix = into if into.dim() == 2 else into.unsqueeze(0)
    count = max(1, _AT_ONCE // matrix.shape[1])
    for first in range(0, len(matrix), count):
        for left in range(0, matrix.shape[1], _AT_ONCE):
            yield matrix[first : first + count, left : left + _AT_ONCE]


def _launch(dtype: DType, packed: torch.Tensor, rows: torch.Tensor, lost: torch.Tensor | None) -> None:
    total, table = rows.numel(), _table(dtype.name, rows.device)
    bits = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows
    kernel[(triton.cdiv(total, _SIZE),)](
        packed, bits, packed if table is None else table, packed if lost is None else lost,
        rows.shape[1], rows.stride(0), rows.stride(1), total,
        element=elements_of(dtype.name), block=dtype.block, block_bytes=dtype.block_bytes,
        kind=str(rows.dtype).removeprefix("torch."), size=_SIZE,
        **OPTIONS,
    )  # fmt: skip


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def elements_of(name: str) -> object:
    """Return the function of a type that says what an element of its blocks is."""
    found: object = getattr(import_module(f"{__package__}.{FAMILY[name]}"), name.lower())
    return found


@cache
def _table(name: str, device: torch.device) -> torch.Tensor | None:
    """Return what the elements of a type are looked up in, int8; None for those that are not looked up."""
    levels = {"IQ4_NL": NONLINEAR, "IQ4_XS": NONLINEAR, "MXFP4": FP4, "NVFP4": FP4}.get(name)
    grid = GRIDS.get("IQ1_S" if name == "IQ1_M" else name)
    if levels is None and grid is None:
        return None
    values = levels if grid is None else list(grid.vectors())
    return torch.tensor(values, dtype=torch.int8, device=device).view(-1)
