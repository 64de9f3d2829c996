"""Types whose blocks have one scale: Q1_0, Q2_0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. Layouts: ggml, ``ggml-common.h``.

Every decoder takes uint8 blocks (n, bytes) and returns float32 (n, ...) with the elements of a block in order.
Multiplication and addition stay apart, each rounded as in C: a fused one would give other bits.
"""

from __future__ import annotations

import torch

from tensorferry.numerics.gguf.fields import half, planes, run, signed_bytes

__all__ = ["q1_0", "q2_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]


def q1_0(b: torch.Tensor) -> torch.Tensor:
    """128 signs: a set bit is the scale, a clear one its negative."""
    return run(b[:, 2:], 1).to(torch.float32).mul_(2).sub_(1).mul_(half(b, 0))


def q2_0(b: torch.Tensor) -> torch.Tensor:
    """64 codes of 2 bits in a run, for -1 to 2 scales."""
    return run(b[:, 2:], 2).to(torch.float32).sub_(1).mul_(half(b, 0))


def q4_0(b: torch.Tensor) -> torch.Tensor:
    """32 codes of 4 bits, for -8 to 7 scales: low halves of the bytes first, then high ones."""
    return _times(planes(b[:, 2:], 4).to(torch.float32).sub_(8), half(b, 0))


def q4_1(b: torch.Tensor) -> torch.Tensor:
    """32 codes of 4 bits as in Q4_0, times a scale plus a minimum."""
    return _times(planes(b[:, 4:], 4).to(torch.float32), half(b, 0), half(b, 2))


def q5_0(b: torch.Tensor) -> torch.Tensor:
    """32 codes of 5 bits, for -16 to 15 scales; the fifth bits come in a run before the others."""
    return _times(_five_bits(b[:, 2:]).to(torch.float32).sub_(16), half(b, 0))


def q5_1(b: torch.Tensor) -> torch.Tensor:
    """32 codes of 5 bits as in Q5_0, times a scale plus a minimum."""
    return _times(_five_bits(b[:, 4:]).to(torch.float32), half(b, 0), half(b, 2))


def q8_0(b: torch.Tensor) -> torch.Tensor:
    """32 signed bytes times a scale."""
    return signed_bytes(b[:, 2:]).mul_(half(b, 0))


def _five_bits(packed: torch.Tensor) -> torch.Tensor:
    return planes(packed[:, 4:], 4).flatten(1) | (run(packed[:, :4], 1) << 4)


def _times(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None = None) -> torch.Tensor:
    values = codes.flatten(1).mul_(scale)
    return values if minimum is None else values.add_(minimum)
