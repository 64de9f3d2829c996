"""Types whose codes of 4 bits stand for uneven levels: IQ4_NL, IQ4_XS, MXFP4, NVFP4. Layouts: ggml, ``ggml-common.h``.

Every decoder takes uint8 blocks (n, bytes) and returns float32 (n, ...) with the elements of a block in order.
"""

from __future__ import annotations

import torch

from tensorferry.numerics.gguf.fields import half, run
from tensorferry.numerics.gguf.tables import FP4, NONLINEAR, half_e8m0, half_ue4m3, pairs

__all__ = ["iq4_nl", "iq4_xs", "mxfp4", "nvfp4"]


def iq4_nl(b: torch.Tensor) -> torch.Tensor:
    """32 codes under one scale: low halves of the bytes first, then high ones."""
    return _levels(b[:, 2:].unsqueeze(1), NONLINEAR, half(b, 0).unsqueeze(1))


def iq4_xs(b: torch.Tensor) -> torch.Tensor:
    """256 codes in 8 groups like those of IQ4_NL; the scale of a group has 6 bits, for -32 to 31."""
    low = run(b[:, 4:8], 4)
    high = run(b[:, 2:4], 2)
    scale = (low | (high << 4)).to(torch.float32).sub_(32).mul_(half(b, 0))
    return _levels(b[:, 8:].reshape(-1, 8, 16), NONLINEAR, scale.unsqueeze(-1))


def mxfp4(b: torch.Tensor) -> torch.Tensor:
    """32 codes of E2M1 under a scale that is a power of two."""
    scale = half_e8m0(b.device).index_select(0, b[:, 0].to(torch.int32))
    return _levels(b[:, 1:].unsqueeze(1), FP4, scale.unsqueeze(1))


def nvfp4(b: torch.Tensor) -> torch.Tensor:
    """64 codes of E2M1 in 4 groups, each under a scale of 8 bits; the scale of the whole tensor is stored elsewhere."""
    scale = half_ue4m3(b.device)[b[:, :4].to(torch.int32)]
    return _levels(b[:, 4:].reshape(-1, 4, 8), FP4, scale)


def _levels(codes: torch.Tensor, levels: tuple[int, ...], scale: torch.Tensor) -> torch.Tensor:
    """Look up groups of bytes (n, groups, k): first their low halves, then their high ones; times (n, groups, 1)."""
    table = pairs(levels, codes.device)
    found = table.index_select(0, codes.flatten().to(torch.int32)).view(*codes.shape, 2)
    return found.transpose(-1, -2).mul(scale.unsqueeze(-1))
