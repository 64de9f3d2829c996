"""Copying values into parameters of another type, and counting what a narrower type could not hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from tensorferry.core.dtypes import Cast, cast_kind
from tensorferry.numerics.torch_dtypes import dtype_of

__all__ = ["Loss", "copy_counting", "counted_on_device", "counting_later", "fill", "writing"]

_BLOCK = 1 << 16  # elements looked at together, so that counting needs no memory to speak of
_BLOCK_ELSEWHERE = 1 << 22  # on a device that works on its own each look waits for it, so there are few


class Loss(NamedTuple):
    """Elements that a cast spoiled. overflow: out of the range of the narrower type, which holds infinity, NaN or its
    largest value there, as it can; infinities that it cannot hold, too. underflow: to zero.
    """

    overflow: int = 0
    underflow: int = 0

    def __add__(self, other: object) -> Loss:
        if not isinstance(other, Loss):
            return NotImplemented
        return Loss(self.overflow + other.overflow, self.underflow + other.underflow)

    def __str__(self) -> str:
        return f"{self.overflow} overflow, {self.underflow} underflow"


def copy_counting(into: torch.Tensor, values: torch.Tensor) -> Loss:
    """Copy `values` into `into` of the same shape, rounding once, and return what was lost on the way.

    Only casts to a narrower range are looked at; others cost nothing extra. Gradients play no part: leaves that
    require them, and tensors made in inference mode, are written to like any other.
    """
    if not into.is_contiguous():
        # In the order in which it lies, torch turns matrices tile by tile, which is several times as fast.
        order = sorted(range(into.dim()), key=into.stride, reverse=True)
        into, values = into.permute(order), values.permute(order)
    with writing(into):
        into.copy_(values)
        if into.dtype == values.dtype or cast_kind(dtype_of(values.dtype), dtype_of(into.dtype)) is not Cast.NARROWS:
            return Loss()
        return sum((_lost(got, had) for got, had in _blocks(into, values)), Loss())


_LATER: ContextVar[list[torch.Tensor] | None] = ContextVar("counts that nobody has looked at", default=None)


@contextmanager
def counting_later() -> Iterator[list[torch.Tensor]]:
    """Yield a list to which counts of spoiled elements go inside, for this thread; what is returned is then `Loss()`.

    Looking at a count waits for the device that counts. Those in the list are int64 of shape (2,), on that device:
    overflow and underflow.
    """
    counts: list[torch.Tensor] = []
    token = _LATER.set(counts)
    try:
        yield counts
    finally:
        _LATER.reset(token)


def counted_on_device(counts: torch.Tensor) -> Loss:
    """Return the loss that two counts are, or none yet inside `counting_later`, to which they go."""
    later = _LATER.get()
    if later is None:
        return Loss(*counts.tolist())
    later.append(counts.to(torch.int64))
    return Loss()


def fill(into: torch.Tensor, value: float | None) -> None:
    """Set every element of `into` to `value`, zero without one; types that torch cannot fill take zero only."""
    if not into.numel():
        return
    with writing(into):
        try:
            into.fill_(value or 0)
        except NotImplementedError:
            if value:
                raise
            into.copy_(torch.zeros(into.shape, dtype=torch.uint8, device=into.device).view(into.dtype))


def writing(into: torch.Tensor) -> AbstractContextManager[object]:
    """Return the mode in which `into` may be written to; modes are of one thread, so each thread asks for itself."""
    return torch.inference_mode() if into.is_inference() else torch.no_grad()


def _blocks(got: torch.Tensor, had: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield equal parts of both tensors that are small enough to be compared at once."""
    if got.numel() <= (_BLOCK if had.device.type == "cpu" else _BLOCK_ELSEWHERE):
        yield got.to(had.device), had
        return
    dim = max(range(got.dim()), key=lambda d: got.shape[d])
    half = got.shape[dim] // 2
    for start, length in ((0, half), (half, got.shape[dim] - half)):
        yield from _blocks(got.narrow(dim, start, length), had.narrow(dim, start, length))


def _lost(got: torch.Tensor, had: torch.Tensor) -> Loss:
    if had.dtype.is_complex:
        return _lost(torch.view_as_real(got.resolve_conj()), torch.view_as_real(had.resolve_conj()))
    if not had.dtype.is_floating_point:
        wrapped = (got.to(had.dtype) != had) | (_negative(got) != _negative(had))
        overflow = wrapped.sum()
        return counted_on_device(torch.stack([overflow, torch.zeros_like(overflow)]))
    wide = torch.float64 if had.dtype == torch.float64 else torch.float32
    most, got, had = _largest(got.dtype), got.to(wide), had.to(wide)
    if _LATER.get() is None and _nothing_lost(got, had, most):
        return Loss()
    overflow = torch.where(had.isinf(), ~got.isinf(), had.isfinite() & (~got.isfinite() | (had.abs() > most)))
    underflow = (had != 0) & (got == 0)
    return counted_on_device(torch.stack([overflow.sum(), underflow.sum()]))


def _nothing_lost(got: torch.Tensor, had: torch.Tensor, most: float) -> bool:
    """Whether a glance is enough: all of `had` is well inside the range, and as many elements are zero as were."""
    low, high = had.aminmax() if had.numel() else (had.sum(), had.sum())
    return -most < float(low) and float(high) < most and bool(got.count_nonzero() == had.count_nonzero())


def _negative(values: torch.Tensor) -> torch.Tensor:
    if not values.dtype.is_signed:
        return torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    return values < 0


def _largest(dtype: torch.dtype) -> float:
    """Return the largest magnitude that rounds into `dtype`: half a step above its maximum.

    Types without an infinity saturate, so what is too large for them cannot be told from the result.
    """
    info = torch.finfo(dtype)
    return float(info.max + info.eps * math.ldexp(1.0, math.frexp(info.max)[1] - 1) / 2)
