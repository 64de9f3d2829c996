"""Types with three levels: TQ1_0, TQ2_0. Layouts: ggml, ``ggml-common.h``.

Every decoder takes uint8 blocks (n, bytes) and returns float32 (n, ...) with the elements of a block in order.
"""

from __future__ import annotations

import torch

from tensorferry.numerics.gguf.fields import half, planes

__all__ = ["tq1_0", "tq2_0"]


def tq1_0(b: torch.Tensor) -> torch.Tensor:
    """256 digits of base 3, five to a byte and at the end four; a byte is the digits as a fraction of 256."""
    digits = torch.cat((_digits(b[:, :32], 5), _digits(b[:, 32:48], 5), _digits(b[:, 48:52], 4)), 1)
    return digits.to(torch.float32).sub_(1).mul_(half(b, 52))


def tq2_0(b: torch.Tensor) -> torch.Tensor:
    """256 codes of 2 bits, for -1 to 2 scales, in two halves of 32 bytes."""
    codes = planes(b[:, :64].reshape(-1, 2, 32), 2).flatten(1)
    return codes.to(torch.float32).sub_(1).mul_(half(b, 64))


def _digits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return (n, count * k): the first digits of all k bytes, then the second ones."""
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8, device=packed.device)
    shifted = packed.unsqueeze(1) * powers.view(1, -1, 1)  # digits before the one asked for run over the byte
    return (shifted.to(torch.int16) * 3 >> 8).flatten(1)
