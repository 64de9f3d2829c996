"""Elements of the types with codebooks. Their table is the vectors of the codebook, one after the other, int8."""

from __future__ import annotations

import triton.language as tl

from tensorferry.numerics.gguf.device.bits import byte, half, half_of, jit, signed, word, word4

__all__ = ["iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs"]


@jit
def element(table: tl.tensor, at: tl.tensor) -> tl.tensor:
    return tl.load(table + at).to(tl.float32)


@jit
def even_sign(code: tl.tensor, i: tl.tensor) -> tl.tensor:
    """Return the sign of element `i` of 8 of which 7 bits are stored; the eighth makes the number of set ones even."""
    odd = code ^ code >> 4
    odd = odd ^ odd >> 2
    return (code | (odd ^ odd >> 1) << 7) >> i % 8 & 1


@jit
def scale_of_half(b: tl.tensor, at: tl.tensor, i: tl.tensor) -> tl.tensor:
    return half(b, 0) * ((byte(b, at + i // 32) >> 4 * (i // 16 % 2) & 15).to(tl.float32) + 0.5) * 0.25


@jit
def iq2_xxs(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    vector, group = i // 8 % 4, 2 + 8 * (i // 32)
    rest = word4(b, group + 4)
    scale = half(b, 0) * ((rest >> 28 & 15).to(tl.float32) + 0.5) * 0.25
    value = element(table, 8 * byte(b, group + vector) + i % 8)
    return signed(value, even_sign(rest >> 7 * vector & 127, i)) * scale


@jit
def iq2_xs(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    code = word(b, 2 + 2 * (i // 8))
    value = element(table, 8 * (code & 511) + i % 8)
    return signed(value, even_sign(code >> 9, i)) * scale_of_half(b, 66, i)


@jit
def iq2_s(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    vector = i // 8
    index = byte(b, 2 + vector) | (byte(b, 66 + vector // 4) >> 2 * (vector % 4) & 3) << 8
    value = element(table, 8 * index + i % 8)
    return signed(value, byte(b, 34 + vector) >> i % 8 & 1) * scale_of_half(b, 74, i)


@jit
def iq3_xxs(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    rest = word4(b, 66 + 4 * (i // 32))
    scale = half(b, 0) * ((rest >> 28 & 15).to(tl.float32) + 0.5) * 0.5
    value = element(table, 4 * byte(b, 2 + i // 4) + i % 4)
    return signed(value, even_sign(rest >> 7 * (i // 8 % 4) & 127, i)) * scale


@jit
def iq3_s(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    vector, group = i // 4, i // 32
    index = byte(b, 2 + vector) | (byte(b, 66 + group) >> vector % 8 & 1) << 8
    scale = half(b, 0) * (2 * (byte(b, 106 + group // 2) >> 4 * (group % 2) & 15) + 1).to(tl.float32)
    return signed(element(table, 4 * index + i % 4), byte(b, 74 + i // 8) >> i % 8 & 1) * scale


@jit
def shifted(table: tl.tensor, index: tl.tensor, i: tl.tensor, down: tl.tensor) -> tl.tensor:
    return element(table, 8 * index + i % 8) + tl.where(down != 0, -0.125, 0.125)


@jit
def iq1_s(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    rest = word(b, 34 + 2 * (i // 32))
    index = byte(b, 2 + i // 8) | (rest >> 3 * (i // 8 % 4) & 7) << 8
    scale = half(b, 0) * (2 * (rest >> 12 & 7) + 1).to(tl.float32)
    return shifted(table, index, i, rest >> 15) * scale


@jit
def iq1_m(b: tl.tensor, i: tl.tensor, table: tl.tensor) -> tl.tensor:
    vector, pair = i // 8, i // 16
    rest = byte(b, 32 + pair) >> 4 * (vector % 2)
    index = byte(b, vector) | (rest & 7) << 8
    whole = word(b, 48) >> 12 | word(b, 50) >> 12 << 4 | word(b, 52) >> 12 << 8 | word(b, 54) >> 12 << 12
    scale = half_of(whole) * (2 * (word(b, 48 + 2 * (pair // 4)) >> 3 * (pair % 4) & 7) + 1).to(tl.float32)
    return shifted(table, index, i, rest & 8) * scale
