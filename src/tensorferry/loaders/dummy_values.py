"""Values that stand in for weights: seeded, small, and of every dtype that a parameter may have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

__all__ = ["fill"]

_CHUNK = 1 << 22
"""Elements that are made at a time. A part of what is drawn, so it never changes."""

_RANGE = 1e-3
_ONE = 127
"""The code of 1 in float8_e8m0fnu: 2 ** (code - 127)."""


def fill(name: str, into: torch.Tensor, seed: int) -> None:
    """Give `into` values that depend on `seed`, `name`, its dtype and its number of elements, and on nothing else.

    Floats and both parts of complex numbers are uniform in ±0.001; float8 in ±1, since most smaller numbers are none
    there; scales, which are float8_e8m0fnu or uint8 with "scale" in the name, 2⁻⁸ to 2⁻⁶; variances of batch norms
    about 1. Codes, which are uint8, int8 and float4, are any bytes. Other integers and booleans are 0 or 1: a valid
    code, index and flag at once. A tensor with an attribute `dummy_value` gets that.
    """
    declared = getattr(into, "dummy_value", None)
    if declared is not None:
        into.fill_(declared)
        return
    generator = torch.Generator().manual_seed(_seed_of(seed, name))
    values = (_drawn(name, into.dtype, count, generator) for count in _counts(into.numel()))
    if not into.is_contiguous():
        if into.numel():
            into.copy_(torch.cat(list(values)).view(into.shape))
        return
    flat, at = into.view(-1), 0
    for part in values:
        flat[at : at + part.numel()].copy_(part)
        at += part.numel()


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _counts(total: int) -> Iterator[int]:
    for at in range(0, total, _CHUNK):
        yield min(_CHUNK, total - at)


def _drawn(name: str, dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_complex:
        parts = _uniform(2 * count, _RANGE, generator)
        return parts.to(dtype.to_real()).view(dtype)
    if dtype == torch.float8_e8m0fnu or (dtype == torch.uint8 and "scale" in name):
        return _integers(count, _ONE - 8, _ONE - 5, torch.uint8, generator).view(dtype)
    if dtype in (torch.uint8, torch.int8, torch.float4_e2m1fn_x2):
        return _integers(count, 0, 256, torch.uint8, generator).view(dtype)
    if not dtype.is_floating_point:
        return _integers(count, 0, 2, torch.uint8, generator).to(dtype)
    values = _uniform(count, 1.0 if dtype.itemsize == 1 else _RANGE, generator)
    return (values + 1.0 if name.endswith("running_var") else values).to(dtype)


def _uniform(count: int, bound: float, generator: torch.Generator) -> torch.Tensor:
    return (torch.rand(count, generator=generator, dtype=torch.float32, device="cpu") * 2 - 1) * bound


def _integers(count: int, low: int, high: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, (count,), generator=generator, dtype=dtype, device="cpu")
