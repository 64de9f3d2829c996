"""Elements of the types whose blocks have one scale."""

from __future__ import annotations

import triton.language as tl

from tensorferry.numerics.gguf.device.bits import byte, half, jit, signed_byte

__all__ = ["q1_0", "q2_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]


@jit
def q1_0(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    code = byte(b, 2 + i // 8) >> i % 8 & 1
    return (2 * code - 1).to(tl.float32) * half(b, 0)


@jit
def q2_0(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    code = byte(b, 2 + i // 4) >> 2 * (i % 4) & 3
    return (code - 1).to(tl.float32) * half(b, 0)


@jit
def four_bits(b: tl.tensor, at: tl.tensor, i: tl.tensor) -> tl.tensor:
    return byte(b, at + i % 16) >> 4 * (i // 16) & 15


@jit
def five_bits(b: tl.tensor, at: tl.tensor, i: tl.tensor) -> tl.tensor:
    return four_bits(b, at + 4, i) | (byte(b, at + i // 8) >> i % 8 & 1) << 4


@jit
def q4_0(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    return (four_bits(b, 2, i) - 8).to(tl.float32) * half(b, 0)


@jit
def q4_1(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    return four_bits(b, 4, i).to(tl.float32) * half(b, 0) + half(b, 2)


@jit
def q5_0(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    return (five_bits(b, 2, i) - 16).to(tl.float32) * half(b, 0)


@jit
def q5_1(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    return five_bits(b, 4, i).to(tl.float32) * half(b, 0) + half(b, 2)


@jit
def q8_0(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    return signed_byte(b, 2 + i).to(tl.float32) * half(b, 0)
