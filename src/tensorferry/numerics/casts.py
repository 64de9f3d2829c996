"""Copying values into parameters of another type, and counting what a narrower type could not hold."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tensorferry.core.dtypes import Cast, cast_kind
from tensorferry.numerics.torch_dtypes import dtype_of

__all__ = ["Loss", "copy_counting", "fill"]


class Loss(NamedTuple):
    """Elements that a cast spoiled: to infinity or out of range, and to zero."""

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

    Only casts to a narrower range are looked at; others cost nothing extra.
    """
    into.copy_(values)
    if into.dtype == values.dtype or cast_kind(dtype_of(values.dtype), dtype_of(into.dtype)) is not Cast.NARROWS:
        return Loss()
    got = into.to(values.device)
    if not values.dtype.is_floating_point:
        return Loss(overflow=int((got.to(values.dtype) != values).sum()))
    got, had = got.float(), values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)
    overflow = had.isfinite() & ~got.isfinite()
    underflow = (had != 0) & (got == 0)
    return Loss(int(overflow.sum()), int(underflow.sum()))


def fill(into: torch.Tensor, value: float | None) -> None:
    """Set every element of `into` to `value`, zero without one; types that torch cannot fill take zero only."""
    if not into.numel():
        return
    try:
        into.fill_(value or 0)
    except NotImplementedError:
        if value:
            raise
        into.copy_(torch.zeros(into.shape, dtype=torch.uint8, device=into.device).view(into.dtype))
