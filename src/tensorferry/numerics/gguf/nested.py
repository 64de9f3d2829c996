"""The K types: 256 elements under one scale, in groups with scales of their own. Layouts: ggml, ``ggml-common.h``.

Every decoder takes uint8 blocks (n, bytes) and returns float32 (n, ...) with the elements of a block in order.
Multiplication and subtraction stay apart, each rounded as in C: a fused one would give other bits.
"""

from __future__ import annotations

import torch

from tensorferry.numerics.gguf.fields import half, planes, signed_bytes

__all__ = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]


def q2_k(b: torch.Tensor) -> torch.Tensor:
    """Codes of 2 bits in 16 groups; scale and minimum of a group have 4 bits each."""
    n = len(b)
    scale = (b[:, :16] & 15).to(torch.float32).mul_(half(b, 80)).view(n, 2, 4, 2, 1)
    minimum = (b[:, :16] >> 4).to(torch.float32).mul_(half(b, 82)).view(n, 2, 4, 2, 1)
    codes = planes(b[:, 16:80].reshape(n, 2, 32), 2).view(n, 2, 4, 2, 16)
    return codes.to(torch.float32).mul_(scale).sub_(minimum)


def q3_k(b: torch.Tensor) -> torch.Tensor:
    """Codes of 3 bits, for -4 to 3 scales, in 16 groups; a scale has 6 bits, for -32 to 31."""
    n = len(b)
    low = planes(b[:, 96:104], 4).flatten(1)
    high = planes(b[:, 104:108], 2).flatten(1)
    scale = (low | (high << 4)).to(torch.float32).sub_(32).mul_(half(b, 108)).view(n, 2, 4, 2, 1)
    codes = planes(b[:, 32:96].reshape(n, 2, 32), 2)
    codes = codes.view(n, 8, 32) | (planes(b[:, :32], 1) << 2)
    return codes.view(n, 2, 4, 2, 16).to(torch.float32).sub_(4).mul_(scale)


def q4_k(b: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits in 8 groups; scale and minimum of a group have 6 bits each."""
    n = len(b)
    codes = planes(b[:, 16:].reshape(n, 4, 32), 4).view(n, 8, 32)
    return _scaled(codes, b)


def q5_k(b: torch.Tensor) -> torch.Tensor:
    """Codes of 5 bits, else as in Q4_K; the fifth bits of group i are bit i of 32 bytes."""
    n = len(b)
    codes = planes(b[:, 48:].reshape(n, 4, 32), 4).view(n, 8, 32) | (planes(b[:, 16:48], 1) << 4)
    return _scaled(codes, b)


def q6_k(b: torch.Tensor) -> torch.Tensor:
    """Codes of 6 bits, for -32 to 31 scales, in 16 groups; a scale is a signed byte."""
    n = len(b)
    scale = signed_bytes(b[:, 192:208]).mul_(half(b, 208)).view(n, 2, 4, 2, 1)
    low = planes(b[:, :128].reshape(n, 2, 64), 4).view(n, 2, 4, 32)
    codes = low | (planes(b[:, 128:192].reshape(n, 2, 32), 2) << 4)
    return codes.view(n, 2, 4, 2, 16).to(torch.float32).sub_(32).mul_(scale)


def _scaled(codes: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply 8 groups by their scales and subtract their minimums, which bytes 4 to 15 hold in 6 bits each.

    Of groups 0 to 3 they are the low bits of bytes 0 to 7; of the others the low four bits are in the last four
    bytes, and the two above them on top of those of the first groups.
    """
    first, second, last = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat((first & 63, (last & 15) | (first >> 6 << 4)), 1).to(torch.float32).mul_(half(b, 0))
    minimum = torch.cat((second & 63, (last >> 4) | (second >> 6 << 4)), 1).to(torch.float32).mul_(half(b, 2))
    return codes.to(torch.float32).mul_(scale.unsqueeze(-1)).sub_(minimum.unsqueeze(-1))
