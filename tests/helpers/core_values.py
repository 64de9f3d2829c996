"""Short ways to write the values of the core in tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.target import Slot, Target, TargetTensor


def entry(name: str, shape: Shape, *, dtype: str = "F32", file: str = "model.safetensors", at: int = 0) -> TensorEntry:
    return TensorEntry.at(name, DTYPES[dtype], shape, file, at)


def catalogue_of(shapes: Mapping[str, Shape], *, dtype: str = "F32", file: str = "model.safetensors") -> Catalogue:
    """Return a catalogue of entries that lie behind each other in one file."""
    at, entries = 0, []
    for name, shape in shapes.items():
        entries.append(entry(name, shape, dtype=dtype, file=file, at=at))
        at += entries[-1].nbytes
    return Catalogue(entries, format="safetensors", files=[file])


def target_of(shapes: Mapping[str, Shape], *, dtype: str = "F32") -> dict[str, TargetTensor]:
    """Return unsharded parameters."""
    return {name: TargetTensor.plain(name, DTYPES[dtype], shape) for name, shape in shapes.items()}


def by_name(tensors: Iterable[TargetTensor]) -> Target:
    return {t.name: t for t in tensors}


def rows(shape: Shape, a: int, b: int) -> Region:
    """Return rows ``a:b`` of a tensor of `shape`."""
    return Region(shape, Box((a, *(0 for _ in shape[1:])), (b, *shape[1:])))


def columns(shape: Shape, a: int, b: int) -> Region:
    """Return columns ``a:b`` of a matrix."""
    return Region(shape, Box((0, a), (shape[0], b)))


def slot(local: Region, logical: Shape, window: Region | None = None) -> Slot:
    return Slot(local, logical, window or Region.whole(logical))
