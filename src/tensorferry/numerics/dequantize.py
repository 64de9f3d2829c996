"""Making numbers of packed blocks: which decoder handles which type, and where they go. Decoders live in `gguf`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from types import MappingProxyType, ModuleType

import torch

from tensorferry.core.dtypes import DType
from tensorferry.errors import UnsupportedDtype
from tensorferry.numerics.byte_order import BIG_ENDIAN
from tensorferry.numerics.casts import Loss, copy_counting, writing
from tensorferry.numerics.gguf import codebooks, flat, levels, nested, ternary

__all__ = ["decode_into", "decoders", "dequantize", "kernel_of"]

_log = logging.getLogger(__name__)

Decoder = Callable[[torch.Tensor], torch.Tensor]
"""Takes blocks, uint8 of shape (n, bytes of a block); returns float32 with the n times elements of a block in order."""

Kernel = Callable[[object, object], None]
"""Takes numpy arrays: blocks as above, and what it fills, (n, elements): float32, or uint16 for bits of bfloat16."""

_FAMILIES: Mapping[ModuleType, tuple[str, ...]] = {
    flat: ("Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    nested: ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    codebooks: ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    levels: ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"),
    ternary: ("TQ1_0", "TQ2_0"),
}
_FAMILY = {name: family for family, names in _FAMILIES.items() for name in names}
_DECODERS: Mapping[str, Decoder] = MappingProxyType({n: getattr(f, n.lower()) for n, f in _FAMILY.items()})

_SLICE = 1 << 16
_SLICE_ELSEWHERE = 1 << 22
"""Elements decoded at once: few enough that what a decoder needs on the way stays in the cache of a CPU, and is
small beside what is staged; other devices start a kernel for each operation, and take more at once."""

_WORTH = 1 << 24
"""Elements that a process decodes in torch before it starts numba, which takes a second and 120 MB: a few tensors of
a tiny model are not worth it."""


class _Meter:
    """How many elements were decoded in torch on the CPU; threads may lose some of each other's."""

    elements = 0


def dequantize(dtype: DType, packed: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers of `packed`, uint8 of shape (..., blocks * bytes of a block).

    The result has the shape (..., blocks * elements of a block), on the same device. Raises UnsupportedDtype for a
    type that nothing here decodes.
    """
    shape = (*packed.shape[:-1], packed.shape[-1] // dtype.block_bytes * dtype.block)
    out = torch.empty(shape, dtype=torch.float32, device=packed.device)
    decode_into(dtype, packed, out)
    return out


def decode_into(dtype: DType, packed: torch.Tensor, into: torch.Tensor) -> Loss:
    """Put the numbers of `packed` into `into`, rounded once to its type; return what a narrowing cast spoiled.

    packed: as for `dequantize`. into: of the shape that it returns, of any floating type, with any strides; packed
    bytes move to its device first. What is needed on the way is a few bytes for each of `_SLICE` elements. Raises
    UnsupportedDtype for a type that nothing here decodes.
    """
    packed = packed.to(into.device)
    if into.is_contiguous():
        packed, into = packed.reshape(-1, dtype.block_bytes), into.detach().view(-1, dtype.block)
        if _compiled(dtype, packed, into):
            return Loss()
    row = max(1, prod(into.shape[1:]))
    count = max(1, (_SLICE if into.device.type == "cpu" else _SLICE_ELSEWHERE) // row)
    slices = (slice(at, at + count) for at in range(0, len(into), count))
    return sum((copy_counting(into[part], _numbers(dtype, packed[part])) for part in slices), Loss())


def decoders() -> Mapping[str, Decoder]:
    """Return the torch decoders by the name of the type."""
    return _DECODERS


@cache
def kernel_of(name: str) -> Kernel | None:
    """Return the compiled decoder of a type, which gives the same numbers; None without numba."""
    if find_spec("numba") is None or name not in _FAMILY:
        return None
    module = _FAMILY[name].__name__.replace(".gguf.", ".gguf.compiled.")
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return None
        kernel: Kernel = getattr(import_module(module), name.lower())
    except ImportError as error:  # numba is there, but not for this Python or numpy
        _log.warning("packed tensors are decoded without numba, which is slower: %s", error)
        return None
    return kernel


def _numbers(dtype: DType, packed: torch.Tensor) -> torch.Tensor:
    """Return what `dequantize` does, for a few blocks at once."""
    decoder = decoders().get(dtype.name) or BIG_ENDIAN.get(dtype.name)
    if decoder is None:
        raise UnsupportedDtype(f"{dtype} blocks cannot be dequantized; these can: {', '.join(decoders())}")
    shape = (*packed.shape[:-1], packed.shape[-1] // dtype.block_bytes * dtype.block)
    blocks = packed.reshape(-1, dtype.block_bytes)
    out = torch.empty((len(blocks), dtype.block), dtype=torch.float32, device=packed.device)
    if not _compiled(dtype, blocks, out):
        out = decoder(blocks)
        _Meter.elements += out.numel() if out.device.type == "cpu" else 0
    return out.reshape(shape)


def _compiled(dtype: DType, blocks: torch.Tensor, into: torch.Tensor) -> bool:
    """Let a kernel fill `into`, contiguous (n, elements), where there is one for it; return whether it did."""
    if into.device.type != "cpu" or into.dtype not in (torch.float32, torch.bfloat16) or type(into) is not torch.Tensor:
        return False
    kernel = kernel_of(dtype.name) if _Meter.elements >= _WORTH else None
    if kernel is None:
        return False
    with writing(into):
        bits = into if into.dtype == torch.float32 else into.view(torch.uint16)
        kernel(blocks.contiguous().numpy(), bits.numpy())
    return True
