"""Columns of a matrix, some rows at a time: what `Landing.put` does, in a few calls, for what is most often cut so."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tensorferry.core.schedule import Piece
from tensorferry.execute.placing import Landing
from tensorferry.numerics.torch_dtypes import torch_dtype
from tensorferry.storage.touching import is_untouched_at, touch_at

__all__ = ["Columns"]


class Columns(NamedTuple):
    """Where columns go that are copied as they are. into: of shape (rows, columns), on the CPU.

    is_new: whether nobody has touched that memory; `into` has no gaps then.
    """

    into: torch.Tensor
    is_new: bool

    @classmethod
    def of(cls, landed: Landing, piece: Piece) -> Columns | None:
        """Return where a whole `piece` goes; None where it is no matrix of rows, is cast, or changes its shape."""
        whole, into = landed.whole, landed.into
        if len(piece.box.start) != 2 or piece.strides[1] != 1 or landed.dtype.block != 1 or not into.is_cpu:
            return None
        if tuple(into.shape) != whole.shape or into.dtype != torch_dtype(landed.dtype) or into.is_conj():
            return None
        into = into[piece.box.relative_to(whole.box).slices]
        is_new = into.is_contiguous() and is_untouched_at(into.data_ptr(), into.nbytes)
        return cls(into, is_new)

    def put(self, staged: torch.Tensor, first: int, rows: int, offset: int, stride: int) -> bool:
        """Copy `rows` rows to where they belong, from row `first` on, and return whether that was possible.

        staged: bytes (uint8) of which row after row begins `stride` bytes after the one before, the first one at
        `offset`. It is not possible where values do not lie on addresses for their type.
        """
        kind = self.into.dtype
        size = kind.itemsize
        if offset % size or stride % size or len(staged) % size or staged.storage_offset() % size:
            return False
        if staged.data_ptr() % size:
            return False
        part = self.into.narrow(0, first, rows)
        if self.is_new:
            touch_at(part.data_ptr(), part.nbytes)
        typed = staged.view(kind)
        at = typed.storage_offset() + offset // size
        part.copy_(typed.as_strided(part.shape, (stride // size, 1), at))
        return True
