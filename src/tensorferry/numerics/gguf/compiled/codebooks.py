"""Kernels of the types with codebooks; what the bytes mean is said beside the torch decoders."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorferry.numerics.gguf.compiled.lanes import (
    flipped,
    floats,
    half,
    inline,
    kernel,
    signed_floats,
    store,
    take,
    word,
)
from tensorferry.numerics.gguf.grids import GRIDS

__all__ = ["iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs"]

take4, take8, u16, u32 = take(4), take(8), word(16), word(32)


def flat(name: str) -> Any:
    """Return the vectors of a codebook, one after the other, as bytes."""
    return np.array(list(GRIDS[name].vectors()), dtype=np.int8).view(np.uint8).reshape(-1)


IQ1, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S = map(flat, ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"))
PARITY = np.array([code.bit_count() & 1 for code in range(128)], dtype=np.uint32)


@inline
def even(code: Any) -> Any:
    return code | PARITY[code] << np.uint32(7)


@kernel
def iq2_xxs(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 0))
        for group in range(8):
            at = 2 + 8 * group
            rest = u32(b, at + 4)
            scale = d * (np.float32(0.5) + np.float32(rest >> 28)) * np.float32(0.25)
            for i in range(4):
                vector = floats(take8(IQ2_XXS, 8 * b[at + i])) * scale
                store(o, 32 * group + 8 * i, flipped(vector, even(rest >> 7 * i & 127)))


@kernel
def iq2_xs(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 0))
        for pair in range(16):
            scale = d * (np.float32(0.5) + np.float32(b[66 + pair // 2] >> 4 * (pair % 2) & 15)) * np.float32(0.25)
            for i in range(2 * pair, 2 * pair + 2):
                code = u16(b, 2 + 2 * i)
                vector = floats(take8(IQ2_XS, 8 * (code & 511))) * scale
                store(o, 8 * i, flipped(vector, even(code >> 9)))


@kernel
def iq2_s(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 0))
        for pair in range(16):
            scale = d * (np.float32(0.5) + np.float32(b[74 + pair // 2] >> 4 * (pair % 2) & 15)) * np.float32(0.25)
            for i in range(2 * pair, 2 * pair + 2):
                index = b[2 + i] | (b[66 + i // 4] >> 2 * (i % 4) & 3) << 8
                store(o, 8 * i, flipped(floats(take8(IQ2_S, 8 * index)) * scale, b[34 + i]))


@kernel
def iq3_xxs(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 0))
        for group in range(8):
            rest = u32(b, 66 + 4 * group)
            scale = d * (np.float32(0.5) + np.float32(rest >> 28)) * np.float32(0.5)
            for i in range(8):
                vector = floats(take4(IQ3_XXS, 4 * b[2 + 8 * group + i])) * scale
                store(o, 32 * group + 4 * i, flipped(vector, even(rest >> 7 * (i // 2) & 127) >> 4 * (i % 2)))


@kernel
def iq3_s(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 0))
        for group in range(8):
            scale = d * np.float32(1 + 2 * (b[106 + group // 2] >> 4 * (group % 2) & 15))
            for i in range(8):
                index = b[2 + 8 * group + i] | (b[66 + group] >> i & 1) << 8
                which = b[74 + 4 * group + i // 2] >> 4 * (i % 2)
                store(o, 32 * group + 4 * i, flipped(floats(take4(IQ3_S, 4 * index)) * scale, which))


@kernel
def iq1_s(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 0))
        for group in range(8):
            rest = u16(b, 34 + 2 * group)
            scale = d * np.float32(2 * (rest >> 12 & 7) + 1)
            shift = np.float32(-0.125) if rest >> 15 else np.float32(0.125)
            for i in range(4):
                index = b[2 + 4 * group + i] | (rest >> 3 * i & 7) << 8
                store(o, 32 * group + 8 * i, (signed_floats(take8(IQ1, 8 * index)) + shift) * scale)


@kernel
def iq1_m(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 48) >> 12 | u16(b, 50) >> 12 << 4 | u16(b, 52) >> 12 << 8 | u16(b, 54) >> 12 << 12)
        for pair in range(16):
            scale = d * np.float32(2 * (u16(b, 48 + pair // 4 * 2) >> 3 * (pair % 4) & 7) + 1)
            for i in range(2):
                rest = b[32 + pair] >> 4 * i
                index = b[2 * pair + i] | (rest & 7) << 8
                shift = np.float32(-0.125) if rest & 8 else np.float32(0.125)
                store(o, 16 * pair + 8 * i, (signed_floats(take8(IQ1, 8 * index)) + shift) * scale)
