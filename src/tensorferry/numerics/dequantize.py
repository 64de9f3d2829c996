"""Making numbers of packed blocks: which decoder handles which type. The decoders live beside this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch

from tensorferry.core.dtypes import DType
from tensorferry.errors import UnsupportedDtype
from tensorferry.numerics.byte_order import BIG_ENDIAN
from tensorferry.numerics.gguf import codebooks, flat, levels, nested, ternary

__all__ = ["decoders", "dequantize"]

Decoder = Callable[[torch.Tensor], torch.Tensor]
"""Takes blocks, uint8 of shape (n, bytes of a block); returns float32 with the n times elements of a block in order."""

_DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        "Q1_0": flat.q1_0, "Q2_0": flat.q2_0, "Q4_0": flat.q4_0, "Q4_1": flat.q4_1,
        "Q5_0": flat.q5_0, "Q5_1": flat.q5_1, "Q8_0": flat.q8_0,
        "Q2_K": nested.q2_k, "Q3_K": nested.q3_k, "Q4_K": nested.q4_k, "Q5_K": nested.q5_k, "Q6_K": nested.q6_k,
        "IQ1_S": codebooks.iq1_s, "IQ1_M": codebooks.iq1_m, "IQ2_XXS": codebooks.iq2_xxs, "IQ2_XS": codebooks.iq2_xs,
        "IQ2_S": codebooks.iq2_s, "IQ3_XXS": codebooks.iq3_xxs, "IQ3_S": codebooks.iq3_s,
        "IQ4_NL": levels.iq4_nl, "IQ4_XS": levels.iq4_xs, "MXFP4": levels.mxfp4, "NVFP4": levels.nvfp4,
        "TQ1_0": ternary.tq1_0, "TQ2_0": ternary.tq2_0,
    }
)  # fmt: skip

_SLICE = 1 << 16
_SLICE_ELSEWHERE = 1 << 22
"""Elements decoded at once: few enough that what a decoder needs on the way stays in the cache of a CPU, and is
small beside what is staged; other devices start a kernel for each operation, and take more at once."""


def dequantize(dtype: DType, packed: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers of `packed`, uint8 of shape (..., blocks * bytes of a block).

    The result has the shape (..., blocks * elements of a block), on the same device. Raises UnsupportedDtype for a
    type that nothing here decodes.
    """
    blocks = packed.reshape(-1, dtype.block_bytes)
    out = torch.empty((len(blocks), dtype.block), dtype=torch.float32, device=packed.device)
    for at, values in _decoded(dtype, blocks):
        out[at : at + len(values)] = values
    return out.view(*packed.shape[:-1], packed.shape[-1] // dtype.block_bytes * dtype.block)


def decoders() -> Mapping[str, Decoder]:
    """Return the decoders by the name of the type."""
    return _DECODERS


def _decoded(dtype: DType, blocks: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield slices of a few blocks as float32 numbers (blocks, elements), with the number of the first block."""
    decoder = decoders().get(dtype.name) or BIG_ENDIAN.get(dtype.name)
    if decoder is None:
        raise UnsupportedDtype(f"{dtype} blocks cannot be dequantized; these can: {', '.join(decoders())}")
    count = max(1, (_SLICE if blocks.device.type == "cpu" else _SLICE_ELSEWHERE) // dtype.block)
    for at in range(0, len(blocks), count):
        part = blocks[at : at + count]
        yield at, decoder(part).reshape(len(part), dtype.block)
