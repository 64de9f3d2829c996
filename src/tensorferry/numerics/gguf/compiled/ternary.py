"""Kernels of the types with three levels; what the bytes mean is said beside the torch decoders."""

from __future__ import annotations

from typing import Any

from tensorferry.numerics.gguf.compiled.lanes import half, inline, kernel, signed_floats, store, take, wide, word

__all__ = ["tq1_0", "tq2_0"]

take4, take16, take32, u16 = take(4), take(16), take(32), word(16)


@inline
def digit(codes: Any, power: Any) -> Any:
    return (wide(codes * power) * 3 >> 8) - 1


@kernel
def tq1_0(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, first, second, last = half(u16(b, 52)), take32(b, 0), take16(b, 32), take4(b, 48)
        power = 1
        for i in range(5):
            store(o, 32 * i, signed_floats(digit(first, power)) * d)
            store(o, 160 + 16 * i, signed_floats(digit(second, power)) * d)
            if i < 4:
                store(o, 240 + 4 * i, signed_floats(digit(last, power)) * d)
            power *= 3


@kernel
def tq2_0(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d = half(u16(b, 64))
        for i in range(8):
            code = (take32(b, 32 * (i // 4)) >> 2 * (i % 4)) & 3
            store(o, 32 * i, signed_floats(code - 1) * d)
