"""Making numbers of floats whose bytes lie the other way round, as in big-endian files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch

__all__ = ["BIG_ENDIAN", "turned"]


def turned(dtype: torch.dtype, elements: torch.Tensor) -> torch.Tensor:
    """Return as float32 (n,) the big-endian numbers of `dtype` in `elements`, uint8 of shape (n, bytes of one).

    >>> turned(torch.float16, torch.tensor([[0x3C, 0x00]], dtype=torch.uint8)).tolist()
    [1.0]
    """
    return elements.flip(-1).contiguous().view(dtype).reshape(-1).to(torch.float32)


BIG_ENDIAN: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "F32 big-endian": partial(turned, torch.float32),
        "F16 big-endian": partial(turned, torch.float16),
        "BF16 big-endian": partial(turned, torch.bfloat16),
    }
)
"""A decoder for each type that a big-endian file may hold, by the name that its format gives the type."""
