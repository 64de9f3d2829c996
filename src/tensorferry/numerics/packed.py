"""A tensor in packed blocks as they lie in a file, with what is needed to make numbers of it or hand it to a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorferry.core.boxes import Shape
from tensorferry.core.dtypes import DTYPES, DType, Kind
from tensorferry.errors import ConfigError, shown
from tensorferry.formats.gguf_types import GGML_TYPES
from tensorferry.numerics.dequantize import decode_into

__all__ = ["PackedTensor", "packed_type"]

_NUMBERS = {dtype.name: number for number, dtype in GGML_TYPES.items()}


def packed_type(dtype: DType | str) -> DType:
    """Return the type of blocks that is meant, such as ``"Q4_K"``; raises ConfigError for what is none."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, DType) or found.kind is not Kind.PACKED:
        known = ", ".join(d.name for d in DTYPES.values() if d.kind is Kind.PACKED)
        raise ConfigError(f"{shown(str(dtype))!r} is no type of packed blocks; these are: {known}")
    return found


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """Blocks as they lie, and their type.

    blocks: uint8 of shape (..., bytes of a row), on any device. Raises ConfigError where that is not so, or `dtype` is
    no packed type.

    >>> packed = PackedTensor(torch.zeros(6, 68, dtype=torch.uint8), packed_type("Q8_0"))
    >>> packed.shape, packed.type_name, packed.ggml_type
    ((6, 64), 'Q8_0', 8)
    >>> packed.rows(1, 2), packed.columns(32, 64)
    (PackedTensor(Q8_0 (1, 64)), PackedTensor(Q8_0 (6, 32)))
    """

    blocks: torch.Tensor
    dtype: DType

    def __post_init__(self) -> None:
        packed_type(self.dtype)
        given = self.blocks
        if given.dtype != torch.uint8 or not given.dim() or given.shape[-1] % self.dtype.block_bytes:
            raise ConfigError(
                f"blocks of {self.dtype} are uint8 with rows of a multiple of {self.dtype.block_bytes} bytes, "
                f"not {given.dtype} {tuple(given.shape)}"
            )

    @property
    def shape(self) -> Shape:
        """The shape in elements: that of the numbers."""
        return (*self.blocks.shape[:-1], self.blocks.shape[-1] // self.dtype.block_bytes * self.dtype.block)

    @property
    def type_name(self) -> str:
        """What the type is called in ggml, such as Q4_K."""
        return self.dtype.name

    @property
    def ggml_type(self) -> int | None:
        """The number of the type in ggml; None for big-endian floats, which have none of their own."""
        return _NUMBERS.get(self.dtype.name)

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return self.blocks.nbytes

    def rows(self, start: int, stop: int) -> PackedTensor:
        """Return rows `start` to `stop` of the first dimension, which any two may bound; aliases this one.

        Raises ConfigError outside the tensor, and where there is one dimension only: that is a row.
        """
        if len(self.shape) == 1:
            raise ConfigError(f"{self.dtype} of shape {self.shape} is one row: cut it by columns")
        self._check(start, stop, 0)
        return PackedTensor(self.blocks[start:stop], self.dtype)

    def columns(self, start: int, stop: int) -> PackedTensor:
        """Return elements `start` to `stop` of each row, a part that begins and ends between blocks; aliases this one.

        Raises ConfigError where it would cut through a block.
        """
        self._check(start, stop, -1)
        n, k = self.dtype.block, self.dtype.block_bytes
        if start % n or stop % n:
            raise ConfigError(
                f"columns {start} to {stop} of {self.dtype} {self.shape}: a block is {n} elements, so both have to be "
                f"multiples of {n}; dequantize it to cut it elsewhere"
            )
        return PackedTensor(self.blocks[..., start // n * k : stop // n * k], self.dtype)

    def dequantize(
        self, dtype: torch.dtype = torch.float32, *, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return the numbers, in new memory, of shape `shape`, rounded once to `dtype`, a floating type.

        device: where they are made; the packed bytes travel. None: where these are. Raises UnsupportedDtype where
        nothing here decodes the type, and ConfigError for a `dtype` that is not floating.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype {dtype!r}: a floating torch.dtype is expected, such as torch.bfloat16")
        out = torch.empty(self.shape, dtype=dtype, device=device or self.blocks.device)
        decode_into(self.dtype, self.blocks, out)
        return out

    @staticmethod
    def concat(parts: Sequence[PackedTensor]) -> PackedTensor:
        """Return the rows of all parts, one after the other along the first dimension, in new memory.

        Raises ConfigError for no parts, and for parts of several types or of rows that differ: blocks are never made
        anew.
        """
        kinds = {(p.dtype, p.shape[1:], p.shape[:0] if len(p.shape) > 1 else p.shape) for p in parts}
        if len(kinds) != 1 or len(parts[0].shape) < 2:
            found = ", ".join(f"{p.dtype} {p.shape}" for p in parts) or "nothing"
            raise ConfigError(f"only rows of one type and length can be joined while they are packed, not {found}")
        return PackedTensor(torch.cat([p.blocks for p in parts]), parts[0].dtype)

    def __repr__(self) -> str:
        return f"PackedTensor({self.dtype} {self.shape})"

    def _check(self, start: int, stop: int, dim: int) -> None:
        if not 0 <= start <= stop <= self.shape[dim]:
            what = "columns" if dim else "rows"
            raise ConfigError(f"{what} {start} to {stop} of {self.dtype} {self.shape}: there are {self.shape[dim]}")
