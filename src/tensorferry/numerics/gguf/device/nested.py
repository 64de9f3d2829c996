"""Elements of the K types."""

from __future__ import annotations

import triton.language as tl

from tensorferry.numerics.gguf.device.bits import byte, half, jit, signed_byte

__all__ = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]


@jit
def two_bits(b: tl.tensor, at: tl.tensor, i: tl.tensor) -> tl.tensor:
    """Return the code of element `i` of two halves of 32 bytes, each of which holds four planes."""
    return byte(b, at + 32 * (i // 128) + i % 32) >> 2 * (i // 32 % 4) & 3


@jit
def q2_k(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    both = byte(b, i // 16)
    scale, minimum = (both & 15).to(tl.float32) * half(b, 80), (both >> 4).to(tl.float32) * half(b, 82)
    return two_bits(b, 16, i).to(tl.float32) * scale - minimum


@jit
def q3_k(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    group = i // 16
    low, high = byte(b, 96 + group % 8) >> 4 * (group // 8) & 15, byte(b, 104 + group % 4) >> 2 * (group // 4) & 3
    code = two_bits(b, 32, i) | (byte(b, i % 32) >> i // 32 & 1) << 2
    return (code - 4).to(tl.float32) * (((low | high << 4) - 32).to(tl.float32) * half(b, 108))


@jit
def scaled(code: tl.tensor, b: tl.tensor, group: tl.tensor) -> tl.tensor:
    first, second, last = byte(b, 4 + group % 4), byte(b, 8 + group % 4), byte(b, 12 + group % 4)
    scale = tl.where(group < 4, first & 63, last & 15 | first >> 6 << 4)
    minimum = tl.where(group < 4, second & 63, last >> 4 | second >> 6 << 4)
    return code.to(tl.float32) * (scale.to(tl.float32) * half(b, 0)) - minimum.to(tl.float32) * half(b, 2)


@jit
def q4_k(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    group = i // 32
    return scaled(byte(b, 16 + 32 * (group // 2) + i % 32) >> 4 * (group % 2) & 15, b, group)


@jit
def q5_k(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    group = i // 32
    low, fifth = byte(b, 48 + 32 * (group // 2) + i % 32) >> 4 * (group % 2) & 15, byte(b, 16 + i % 32) >> group & 1
    return scaled(low | fifth << 4, b, group)


@jit
def q6_k(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    plane = i // 32 % 4
    low = byte(b, 64 * (i // 128) + 32 * (plane % 2) + i % 32) >> 4 * (plane // 2) & 15
    code = low | two_bits(b, 128, i) << 4
    return (code - 32).to(tl.float32) * (signed_byte(b, 192 + i // 16).to(tl.float32) * half(b, 208))
