"""Kernels of the types with uneven levels; what the bytes mean is said beside the torch decoders."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tensorferry.numerics.gguf.compiled.lanes import half, kernel, look_up, signed_floats, store, take, word
from tensorferry.numerics.gguf.tables import FP4, NONLINEAR, half_e8m0, half_ue4m3

__all__ = ["iq4_nl", "iq4_xs", "mxfp4", "nvfp4"]

take8, take16, u16 = take(8), take(16), word(16)
nonlinear, fp4 = look_up(NONLINEAR), look_up(FP4)
E8M0 = half_e8m0(torch.device("cpu")).flatten().numpy()
UE4M3 = half_ue4m3(torch.device("cpu")).flatten().numpy()


@kernel
def iq4_nl(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, q = half(u16(b, 0)), take16(b, 2)
        store(o, 0, signed_floats(nonlinear(q & 15)) * d)
        store(o, 16, signed_floats(nonlinear(q >> 4)) * d)


@kernel
def iq4_xs(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, highs = half(u16(b, 0)), u16(b, 2)
        for group in range(8):
            scale = b[4 + group // 2] >> 4 * (group % 2) & 15 | (highs >> 2 * group & 3) << 4
            s, q = d * np.float32(np.int32(scale) - 32), take16(b, 8 + 16 * group)
            store(o, 32 * group, signed_floats(nonlinear(q & 15)) * s)
            store(o, 32 * group + 16, signed_floats(nonlinear(q >> 4)) * s)


@kernel
def mxfp4(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        d, q = E8M0[b[0]], take16(b, 1)
        store(o, 0, signed_floats(fp4(q & 15)) * d)
        store(o, 16, signed_floats(fp4(q >> 4)) * d)


@kernel
def nvfp4(blocks: Any, out: Any) -> None:
    for n in range(len(blocks)):
        b, o = blocks[n], out[n]
        for group in range(4):
            d, q = UE4M3[b[group]], take8(b, 4 + 8 * group)
            store(o, 16 * group, signed_floats(fp4(q & 15)) * d)
            store(o, 16 * group + 8, signed_floats(fp4(q >> 4)) * d)
