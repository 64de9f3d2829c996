"""Bytes of blocks read as numbers, by integers where not every device or interpreter would give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import triton
import triton.language as tl

__all__ = [
    "brain",
    "byte",
    "half",
    "half_of",
    "jit",
    "power_of_two",
    "signed",
    "signed_byte",
    "unspecialized",
    "word",
    "word4",
]

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile for the device at the first call from a kernel."""
    return cast("F", triton.jit(function))


def unspecialized(*names: str) -> Callable[[Callable[..., None]], Any]:
    """Make a kernel, compiled once for whatever integers these arguments are, which ``kernel[grid](...)`` starts."""
    made: Callable[[Callable[..., None]], Any] = triton.jit(do_not_specialize=names)
    return made


@jit
def byte(b: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the byte `at` as int32."""
    return tl.load(b + at).to(tl.int32)


@jit
def signed_byte(b: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the byte `at` read as int8, as int32."""
    return tl.load(b + at).to(tl.int8, bitcast=True).to(tl.int32)


@jit
def word(b: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the two bytes from `at` on as a little-endian number, in int32; they may lie on any address."""
    return byte(b, at) | byte(b, at + 1) << 8


@jit
def word4(b: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the four bytes from `at` on as a little-endian number, in int32."""
    return word(b, at) | word(b, at + 2) << 16


@jit
def half_of(bits: tl.tensor) -> tl.tensor:
    """Return the float32 number of the 16 bits of a float16."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def half(b: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the float16 at byte `at` as float32."""
    return half_of(word(b, at))


@jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """Return 2 ** exponent as float32, from 2 ** -149 on: below 2 ** -126 it is subnormal."""
    subnormal = 1 << tl.minimum(exponent + 149, 22)
    return tl.where(exponent < -126, subnormal, exponent + 127 << 23).to(tl.float32, bitcast=True)


@jit
def signed(values: tl.tensor, negative: tl.tensor) -> tl.tensor:
    """Return the values with their sign turned where `negative` is not zero."""
    return tl.where(negative != 0, -values, values)


@jit
def brain(values: tl.tensor) -> tl.tensor:
    """Return the bits of bfloat16 (int16) that float32 numbers round to, to even between two; NaN are all alike."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return tl.where(values != values, 0x7FC0, rounded).to(tl.int16)
