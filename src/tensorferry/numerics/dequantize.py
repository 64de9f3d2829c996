"""Making numbers of packed blocks: which decoder handles which type where, and where they go. Decoders: `gguf`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from types import MappingProxyType

import torch

from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.errors import UnsupportedDtype
from tensorferry.numerics.byte_order import BIG_ENDIAN
from tensorferry.numerics.casts import Loss, copy_counting, writing
from tensorferry.numerics.gguf import codebooks, flat, levels, nested, ternary
from tensorferry.numerics.gguf.families import FAMILY

__all__ = ["decode_into", "decoders", "dequantize", "device_fill", "foresee", "kernel_of"]

_log = logging.getLogger(__name__)

Decoder = Callable[[torch.Tensor], torch.Tensor]
"""Takes blocks, uint8 of shape (n, bytes of a block); returns float32 with the n times elements of a block in order."""

Kernel = Callable[[object, object], None]
"""Takes numpy arrays: blocks as above, and what it fills, (n, elements): float32, or uint16 for bits of bfloat16."""

Fill = Callable[[DType, torch.Tensor, torch.Tensor], Loss]
"""Takes packed bytes and what they fill on one device, of float32, bfloat16 or float16, as `decode_into` does."""

_MODULES = {module.__name__.rpartition(".")[2]: module for module in (codebooks, flat, levels, nested, ternary)}
_DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {name: getattr(_MODULES[family], name.lower()) for name, family in FAMILY.items()}
)

_SLICE = 1 << 16
_SLICE_ELSEWHERE = 1 << 22
"""Elements decoded at once: few enough that what a decoder needs on the way stays in the cache of a CPU, and is
small beside what is staged; other devices start a kernel for each operation, and take more at once."""

_WORTH = {"cpu": 1 << 28, "cuda": 1 << 28}
"""For each type of device that has compiled decoders, the elements that a process decodes in torch before it starts
those, unless it is told of more: numba takes 0.6 s and 106 MB, as long as decoding so many in torch; Triton a second
and a C compiler."""


class _Meter:
    """How many elements were decoded in torch, by type of device; threads may lose some of each other's.

    foreseen: most elements of one load, past or present.
    """

    elements: Mapping[str, int] = {}
    foreseen = 0

    @classmethod
    def count(cls, out: torch.Tensor) -> None:
        kind = out.device.type
        cls.elements = {**cls.elements, kind: cls.elements.get(kind, 0) + out.numel()}

    @classmethod
    def is_worth(cls, kind: str) -> bool:
        return kind in _WORTH and max(cls.foreseen, cls.elements.get(kind, 0)) >= _WORTH[kind]


def foresee(elements: int) -> None:
    """Say how many elements a load will decode: for many, compiled decoders are started at once."""
    _Meter.foreseen = max(_Meter.foreseen, elements)


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
    bytes move to its device first. What is needed on the way, beside them, is a few bytes for each of `_SLICE` elements
    at most. Raises UnsupportedDtype for a type that nothing here decodes.
    """
    packed, into = packed.to(into.device), into.detach()
    loss = _by_kernel(dtype, packed, into)
    if loss is not None:
        return loss
    if into.is_contiguous() or into.dim() == 1:  # a vector can be seen as blocks, however far its numbers lie apart
        packed, into = packed.reshape(-1, dtype.block_bytes), into.view(-1, dtype.block)
    row = max(1, prod(into.shape[1:]))
    count = max(1, (_SLICE if into.device.type == "cpu" else _SLICE_ELSEWHERE) // row)
    slices = (slice(at, at + count) for at in range(0, len(into), count))
    return sum((copy_counting(into[part], _numbers(dtype, packed[part])) for part in slices), Loss())


def decoders() -> Mapping[str, Decoder]:
    """Return the torch decoders by the name of the type."""
    return _DECODERS


@cache
def kernel_of(name: str) -> Kernel | None:
    """Return the decoder of a type that is compiled for this CPU, which gives the same numbers; None without numba."""
    if find_spec("numba") is None or name not in FAMILY:
        return None
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return None
        kernel: Kernel = getattr(import_module(f"{flat.__package__}.compiled.{FAMILY[name]}"), name.lower())
    except ImportError as error:  # numba is there, but not for this Python or numpy
        _log.warning("packed tensors are decoded without numba, which is slower: %s", error)
        return None
    return kernel


@cache
def device_fill(device: torch.device) -> Fill | None:
    """Return what decodes on a GPU by compiled kernels, to the same numbers; None where Triton is not there or fails.

    Compiles a kernel and runs it once, so as to fail here rather than in a load.
    """
    if find_spec("triton") is None:
        return None
    try:
        fill: Fill = import_module(f"{flat.__package__}.device.filling").fill
        block = torch.zeros(DTYPES["Q8_0"].block_bytes, dtype=torch.uint8, device=device)
        fill(DTYPES["Q8_0"], block, torch.empty(32, device=device))
    except Exception as error:  # noqa: BLE001 - a compiler, a driver or a device of any kind may refuse; torch does it, too
        _log.warning("packed tensors are decoded on %s without Triton, which is slower: %s", device, error)
        return None
    return fill


def _numbers(dtype: DType, packed: torch.Tensor) -> torch.Tensor:
    """Return what `dequantize` does, for a few blocks at once."""
    decoder = decoders().get(dtype.name) or BIG_ENDIAN.get(dtype.name)
    if decoder is None:
        raise UnsupportedDtype(f"{dtype} blocks cannot be dequantized; these can: {', '.join(decoders())}")
    shape = (*packed.shape[:-1], packed.shape[-1] // dtype.block_bytes * dtype.block)
    blocks = packed.reshape(-1, dtype.block_bytes)
    out = torch.empty((len(blocks), dtype.block), dtype=torch.float32, device=packed.device)
    if _by_kernel(dtype, blocks, out) is None:
        out = decoder(blocks)
        _Meter.count(out)
    return out.reshape(shape)


def _by_kernel(dtype: DType, packed: torch.Tensor, into: torch.Tensor) -> Loss | None:
    """Let a compiled decoder fill `into`, where there is one for it and it is worth it; else return None."""
    kind = into.device.type
    if type(into) is not torch.Tensor or dtype.name not in FAMILY or not _Meter.is_worth(kind):
        return None
    return _COMPILED[kind](dtype, packed, into)


def _by_numba(dtype: DType, packed: torch.Tensor, into: torch.Tensor) -> Loss | None:
    if not into.is_contiguous() or into.dtype not in (torch.float32, torch.bfloat16):
        return None
    kernel = kernel_of(dtype.name)
    if kernel is None:
        return None
    with writing(into):
        bits = into if into.dtype == torch.float32 else into.view(torch.uint16)
        blocks = packed.reshape(-1, dtype.block_bytes).contiguous()
        kernel(blocks.numpy(), bits.view(-1, dtype.block).numpy())
    return Loss()


def _by_triton(dtype: DType, packed: torch.Tensor, into: torch.Tensor) -> Loss | None:
    fill = device_fill(into.device) if into.dtype in (torch.float32, torch.bfloat16, torch.float16) else None
    return None if fill is None else fill(dtype, packed, into)


_COMPILED: Mapping[str, Callable[[DType, torch.Tensor, torch.Tensor], Loss | None]] = MappingProxyType(
    {"cpu": _by_numba, "cuda": _by_triton}
)
"""What fills tensors on a type of device, or returns None where it cannot."""
