"""Making numbers of packed blocks: which decoder handles which type. The decoders live beside this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tensorferry.core.dtypes import DType
from tensorferry.errors import UnsupportedDtype

__all__ = ["dequantize"]

Decoder = Callable[[torch.Tensor], torch.Tensor]
"""Takes blocks, uint8 of shape (n, bytes of a block); returns float32 of shape (n, elements of a block)."""


def dequantize(dtype: DType, packed: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers of `packed`, uint8 of shape (..., blocks * bytes of a block).

    The result has the shape (..., blocks * elements of a block), on the same device. Raises UnsupportedDtype for a
    type that nothing here decodes.
    """
    decoder = decoders().get(dtype.name)
    if decoder is None:
        raise UnsupportedDtype(f"{dtype} blocks cannot be dequantized; these can: {', '.join(decoders())}")
    blocks = packed.reshape(-1, dtype.block_bytes)
    return decoder(blocks).reshape(*packed.shape[:-1], packed.shape[-1] // dtype.block_bytes * dtype.block)


def decoders() -> Mapping[str, Decoder]:
    """Return the decoders by the name of the type."""
    return {}
