"""Elements of the types with uneven levels. Their table is the levels, int8."""

from __future__ import annotations

import triton.language as tl

from tensorferry.numerics.gguf.device.bits import byte, half, jit, power_of_two

__all__ = ["iq4_nl", "iq4_xs", "mxfp4", "nvfp4"]


@jit
def level(table: tl.tensor, code: tl.tensor) -> tl.tensor:
    return tl.load(table + code).to(tl.float32)


@jit
def iq4_nl(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    return level(table, byte(b, 2 + i % 16) >> 4 * (i // 16) & 15) * half(b, 0)


@jit
def iq4_xs(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    group = i // 32
    low, high = byte(b, 4 + group // 2) >> 4 * (group % 2) & 15, byte(b, 2 + group // 4) >> 2 * (group % 4) & 3
    code = byte(b, 8 + 16 * group + i % 16) >> 4 * (i // 16 % 2) & 15
    return level(table, code) * (((low | high << 4) - 32).to(tl.float32) * half(b, 0))


@jit
def mxfp4(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    return level(table, byte(b, 1 + i % 16) >> 4 * (i // 16) & 15) * power_of_two(byte(b, 0) - 128)


@jit
def nvfp4(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    group = i // 16
    bits = byte(b, group)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    scale = tl.where(exponent > 0, mantissa + 8, mantissa).to(tl.float32) * power_of_two(tl.maximum(exponent, 1) - 11)
    code = byte(b, 4 + 8 * group + i % 8) >> 4 * (i // 8 % 2) & 15
    return level(table, code) * tl.where(bits == 127, 0.0, scale)
