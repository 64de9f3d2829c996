"""Checks a described tensor against its storage, in integers, and says where its bytes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from tensorferry.core.boxes import Shape, strides_of
from tensorferry.core.catalogue import Span, TensorEntry
from tensorferry.core.dtypes import DType
from tensorferry.errors import CorruptFile, FormatError, UnsafeFile, UnsupportedDtype, shown
from tensorferry.formats.pickle_values import DictValue
from tensorferry.formats.torch_values import MAX_NUMBER, StorageRef, TensorRef
from tensorferry.storage.base import File

__all__ = ["entry_of"]

MAX_RANK = 64
"""More dimensions than any tensor library handles are a damaged file."""


def entry_of(name: str, ref: TensorRef, file: File, places: Mapping[str, Span]) -> TensorEntry:
    """Return the entry of a tensor: its dtype, shape, strides, and the span from its first element to its last.

    places: where each storage of `file` lies. Raises CorruptFile where the tensor is no part of its storage,
    UnsafeFile where it has hooks, UnsupportedDtype and FormatError where it has no plain values; all name it.
    """
    where = _Where(file.path, name)
    dtype = _plain(where, ref)
    _check_geometry(where, ref)
    extent = _extent(ref.shape, ref.strides)
    span = _storage_span(where, ref.storage, file, places)
    room = span.length // dtype.block_bytes
    if ref.offset + extent > room:
        raise CorruptFile(
            f"{where}: elements {ref.offset:,} to {ref.offset + extent:,} of a storage that has {room:,}: "
            f"shape {ref.shape}, strides {ref.strides}"
        )
    strides = _normal(ref.shape, ref.strides)
    shape = ref.shape
    if dtype.block > 1:
        shape, strides = _unpacked(where, dtype, shape, strides)
    begin = span.offset + ref.offset * dtype.block_bytes
    return TensorEntry.at(name, dtype, shape, file.path, begin, strides=strides, length=extent * dtype.block_bytes)


class _Where(NamedTuple):
    """The beginning of a message about a tensor; put into words only when there is one."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{shown(self.path)}: tensor {shown(self.name)!r}"


def _plain(where: _Where, ref: TensorRef) -> DType:
    if ref.element.dtype is None:
        raise UnsupportedDtype(f"{where}: dtype torch.{ref.element.name} is not read; save dequantized values")
    if any(hooks is not None and (hooks or not isinstance(hooks, DictValue)) for hooks in ref.hooks):
        raise UnsafeFile(f"{where}: it carries backward hooks, which are code; save it without them")
    if ref.flags is not None and not _all_false(ref.flags):
        raise FormatError(f"{where}: a lazily conjugated or negated view; save resolve_conj().resolve_neg() of it")
    if ref.storage.location.partition(":")[0] == "meta":
        raise FormatError(f"{where}: it is on the meta device and has no values")
    return ref.element.dtype


def _all_false(flags: object) -> bool:
    return isinstance(flags, DictValue) and not flags.rest and not any(flags.items.values())


def _check_geometry(where: _Where, ref: TensorRef) -> None:
    shape, strides = ref.shape, ref.strides
    if len(shape) != len(strides) or len(shape) > MAX_RANK:
        raise CorruptFile(f"{where}: {len(shape)} sizes and {len(strides)} strides, at most {MAX_RANK} of each")
    if min((ref.offset, *shape, *strides), default=0) < 0:
        raise CorruptFile(f"{where}: negative offset, size or stride: {ref.offset}, {shape}, {strides}")
    if prod(shape) > MAX_NUMBER or _extent(shape, strides) > MAX_NUMBER:
        raise CorruptFile(f"{where}: shape {shape} with strides {strides} is beyond 64-bit sizes")
    if _shares_elements(shape, strides):
        raise CorruptFile(
            f"{where}: an expanded view, whose shape {shape} with strides {strides} shows one element several times; "
            f"save contiguous() of it"
        )


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of the storage lie between a view's first element and its last, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _shares_elements(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices may fall on one element: a dimension does not step over all that lies below it."""
    if 0 in shape:
        return False
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def _normal(shape: Shape, strides: Shape) -> Shape | None:
    """Return strides without the freedom that sizes of one leave, or None where they are row-major."""
    natural = strides_of(shape)
    if 0 in shape:
        return None
    kept = tuple(row if n == 1 else step for n, step, row in zip(shape, strides, natural, strict=True))
    return None if kept == natural else kept


def _unpacked(where: _Where, dtype: DType, shape: Shape, strides: Shape | None) -> tuple[Shape, None]:
    """Torch counts the bytes of packed types; a catalogue counts their elements."""
    if not shape or strides is not None:
        raise UnsupportedDtype(f"{where}: a {dtype} tensor that is a scalar or not contiguous; save contiguous() of it")
    return (*shape[:-1], shape[-1] * dtype.block), None


def _storage_span(where: _Where, storage: StorageRef, file: File, places: Mapping[str, Span]) -> Span:
    place = places.get(storage.key)
    if place is None:
        raise CorruptFile(f"{where}: its storage {shown(storage.key)!r} is not in the file")
    if place.length != storage.nbytes:
        raise CorruptFile(
            f"{where}: its storage {shown(storage.key)!r} should have {storage.nbytes:,} bytes, the file has "
            f"{place.length:,} for it"
        )
    if place.offset + place.length > file.size:
        raise CorruptFile(
            f"{where}: truncated: its storage {shown(storage.key)!r} ends at byte {place.offset + place.length:,}, the "
            f"file has {file.size:,}; incomplete download?"
        )
    if storage.view is None:
        return place
    first, numel = storage.view
    return Span(place.file, place.offset + first * storage.type.itemsize, numel * storage.type.itemsize)
