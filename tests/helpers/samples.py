"""Tensors as what a file holds of them: a type, a shape, and bytes; to be written and compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from tensorferry.core.boxes import Shape
from tensorferry.core.dtypes import DTYPES, DType, Kind
from tensorferry.formats.writing import NewTensor
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape

__all__ = ["Sample", "as_new", "bits", "of_values", "sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A tensor to be written. data: row-major and little-endian."""

    dtype: DType
    shape: Shape
    data: bytes = field(repr=False)

    @property
    def tensor(self) -> torch.Tensor:
        """Return it as torch holds it, in memory of its own."""
        flat = (
            torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
            if self.data
            else torch.empty(0, dtype=torch.uint8)
        )
        return flat.view(torch_dtype(self.dtype)).view(torch_shape(self.dtype, self.shape))


def sample(dtype: str, *shape: int, seed: int = 0) -> Sample:
    """Return a tensor of the type of that name, whose bytes all differ from their neighbours'."""
    kind = DTYPES[dtype]
    most = 2 if kind.kind is Kind.BOOL else 251
    return Sample(kind, shape, bytes((seed + 37 * i + i // most) % most for i in range(kind.nbytes(shape))))


def of_values(tensor: torch.Tensor, dtype: str) -> Sample:
    """Return a tensor of those values."""
    return Sample(DTYPES[dtype], tuple(tensor.shape), bits(tensor.to(torch_dtype(DTYPES[dtype]))))


def as_new(samples: Mapping[str, Sample], *, cut: int = 7) -> dict[str, NewTensor]:
    """Return what a writer takes, with chunks of `cut` bytes."""
    return {name: NewTensor(s.dtype, s.shape, _cut(s.data, cut)) for name, s in samples.items()}


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, row-major."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _cut(data: bytes, size: int) -> Iterable[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]
