"""Elements of the types with three levels."""

from __future__ import annotations

import triton.language as tl

from tensorferry.numerics.gguf.device.bits import byte, half, jit

__all__ = ["tq1_0", "tq2_0"]


@jit
def power_of_three(digit: tl.tensor) -> tl.tensor:
    low = tl.where(digit == 0, 1, tl.where(digit == 1, 3, 9))
    return tl.where(digit < 3, low, tl.where(digit == 3, 27, 81))


@jit
def tq1_0(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    at = tl.where(i < 160, i % 32, tl.where(i < 240, 32 + i % 16, 48 + i % 4))
    digit = tl.where(i < 160, i // 32, tl.where(i < 240, i // 16 - 10, i // 4 - 60))
    code = (byte(b, at) * power_of_three(digit) & 255) * 3 >> 8
    return (code - 1).to(tl.float32) * half(b, 52)


@jit
def tq2_0(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    code = byte(b, 32 * (i // 128) + i % 32) >> 2 * (i // 32 % 4) & 3
    return (code - 1).to(tl.float32) * half(b, 64)
