"""Cutting blocks into fields: scales, and codes of a few bits in the orders that ggml stores. No arithmetic here.

Blocks are uint8 tensors of shape (n, bytes); what comes back is on the same device.
"""

from __future__ import annotations

import torch

__all__ = ["half", "planes", "run", "signed_bytes", "words"]


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at byte `at` of each block, as float32 of shape (n, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def words(blocks: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return the bytes read as little-endian integers of the torch dtype `kind`, in int32: shape (n, bytes / width)."""
    return blocks.contiguous().view(kind).to(torch.int32)


def signed_bytes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the bytes read as int8, in float32."""
    return blocks.view(torch.int8).to(torch.float32)


def planes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Split bytes into planes: from (..., k) to (..., 8 / bits, k), where plane 0 is the lowest `bits` of each byte."""
    return torch.stack(_pieces(packed, bits), -2)


def run(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Split bytes into a run of codes: from (..., k) to (..., k * 8 / bits), the lowest `bits` of each byte first."""
    return torch.stack(_pieces(packed, bits), -1).flatten(-2)


def _pieces(packed: torch.Tensor, bits: int) -> list[torch.Tensor]:
    packed = packed.contiguous()  # torch is far slower on rows of a few bytes that lie apart
    return [(packed >> at) & ((1 << bits) - 1) for at in range(0, 8, bits)]
