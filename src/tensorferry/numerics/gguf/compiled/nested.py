"""Kernels of the K types; what the bytes mean is said beside the torch decoders."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorferry.numerics.gguf.compiled.lanes import floats, half, inline, kernel, signed_floats, store, take, word

__all__ = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]

take16, take32, u16 = take(16), take(32), word(16)


@kernel
def q2_k(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, m = half(u16(b, 80)), half(u16(b, 82))
        for group in range(16):
            at, plane = 16 + 32 * (group // 8) + 16 * (group % 2), group // 2 % 4
            scale, minimum = d * np.float32(b[group] & 15), m * np.float32(b[group] >> 4)
            store(o, 16 * group, floats((take16(b, at) >> 2 * plane) & 3) * scale - minimum)


@kernel
def q3_k(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 108))
        for group in range(16):
            at, plane = 32 + 32 * (group // 8) + 16 * (group % 2), group // 2 % 4
            low, high = b[96 + group % 8] >> 4 * (group // 8) & 15, b[104 + group % 4] >> 2 * (group // 4) & 3
            code = (take16(b, at) >> 2 * plane) & 3 | ((take16(b, 16 * (group % 2)) >> (group // 2)) & 1) << 2
            store(o, 16 * group, signed_floats(code - 4) * (d * np.float32((low | high << 4) - 32)))


@inline
def scale_and_minimum(b: Any, group: Any) -> Any:
    if group < 4:
        return b[4 + group] & 63, b[8 + group] & 63
    both = b[8 + group]
    return both & 15 | b[group] >> 6 << 4, both >> 4 | b[4 + group] >> 6 << 4


@kernel
def q4_k(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, m = half(u16(b, 0)), half(u16(b, 2))
        for group in range(8):
            scale, minimum = scale_and_minimum(b, group)
            code = (take32(b, 16 + 32 * (group // 2)) >> 4 * (group % 2)) & 15
            store(o, 32 * group, floats(code) * (d * np.float32(scale)) - m * np.float32(minimum))


@kernel
def q5_k(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, m = half(u16(b, 0)), half(u16(b, 2))
        fifth = take32(b, 16)
        for group in range(8):
            scale, minimum = scale_and_minimum(b, group)
            code = (take32(b, 48 + 32 * (group // 2)) >> 4 * (group % 2)) & 15 | ((fifth >> group) & 1) << 4
            store(o, 32 * group, floats(code) * (d * np.float32(scale)) - m * np.float32(minimum))


@kernel
def q6_k(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 208))
        for group in range(16):
            part, plane, at = group // 8, group // 2 % 4, 16 * (group % 2)
            low = (take16(b, 64 * part + 32 * (plane % 2) + at) >> 4 * (plane // 2)) & 15
            high = (take16(b, 128 + 32 * part + at) >> 2 * plane) & 3
            store(o, 16 * group, signed_floats((low | high << 4) - 32) * (d * np.float32(np.int8(b[192 + group]))))
