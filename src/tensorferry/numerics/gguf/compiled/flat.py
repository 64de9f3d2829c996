"""Kernels of the types whose blocks have one scale; what the bytes mean is said beside the torch decoders."""

from __future__ import annotations

from typing import Any

from tensorferry.numerics.gguf.compiled.lanes import floats, half, kernel, signed_floats, spread, store, take, word

__all__ = ["q1_0", "q2_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]

take16, take32, u16, u32 = take(16), take(32), word(16), word(32)
bits16, pairs16 = spread(1, 16), spread(2, 16)


@kernel
def q1_0(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 0))
        for i in range(0, 128, 16):
            store(o, i, signed_floats(((bits16(u16(b, 2 + i // 8)) & 1) << 1) - 1) * d)


@kernel
def q2_0(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 0))
        for i in range(0, 64, 16):
            store(o, i, signed_floats((pairs16(u32(b, 2 + i // 4)) & 3) - 1) * d)


@kernel
def q4_0(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, q = half(u16(b, 0)), take16(b, 2)
        store(o, 0, signed_floats((q & 15) - 8) * d)
        store(o, 16, signed_floats((q >> 4) - 8) * d)


@kernel
def q4_1(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, m, q = half(u16(b, 0)), half(u16(b, 2)), take16(b, 4)
        store(o, 0, floats(q & 15) * d + m)
        store(o, 16, floats(q >> 4) * d + m)


@kernel
def q5_0(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, q = half(u16(b, 0)), take16(b, 6)
        low, high = bits16(u16(b, 2)) & 1, bits16(u16(b, 4)) & 1
        store(o, 0, signed_floats(((q & 15) | (low << 4)) - 16) * d)
        store(o, 16, signed_floats(((q >> 4) | (high << 4)) - 16) * d)


@kernel
def q5_1(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, m, q = half(u16(b, 0)), half(u16(b, 2)), take16(b, 8)
        low, high = bits16(u16(b, 4)) & 1, bits16(u16(b, 6)) & 1
        store(o, 0, floats((q & 15) | (low << 4)) * d + m)
        store(o, 16, floats((q >> 4) | (high << 4)) * d + m)


@kernel
def q8_0(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        store(o, 0, signed_floats(take32(b, 2)) * half(u16(b, 0)))
