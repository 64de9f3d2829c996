"""GGUF files: where the bytes of their tensors are and what they mean. The header is read in `gguf_header`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tensorferry.core.amounts import few
from tensorferry.core.catalogue import Catalogue, Chunk, Span, TensorEntry
from tensorferry.core.dtypes import Kind
from tensorferry.errors import CorruptFile, shown
from tensorferry.formats.gguf_header import GgufHeader, GgufTensor, read_header
from tensorferry.formats.gguf_split import check_split
from tensorferry.formats.gguf_types import ggml_type
from tensorferry.storage.base import File, Storage

__all__ = ["GgufFormat"]


class GgufFormat:
    """The `FileFormat` of ``.gguf`` files of version 2 and 3, whole or split.

    Entries have the names of the file, shapes with the slowest dimension first, and the types of `gguf_types`. A type
    that is not known there spoils only its tensor: that has no span, and its type is of the kind UNKNOWN.
    """

    name = "gguf"

    def catalogue(self, storage: Storage, file: File) -> Catalogue:
        """Return what the header of `file` declares, in the order of the bytes. Reads nothing but the header.

        Metadata are its single values as text; `gguf_header.read_metadata` has all of them, typed. Raises CorruptFile
        for a file that breaks a rule of the format, UnknownFormat for one that is not GGUF or of an unknown version.
        """
        header = read_header(storage, file, arrays=False)
        what = f"{shown(file.path)} ({shown(storage.uri, 300)})"
        placed = [_Placed(tensor, header, what) for tensor in header.tensors]
        in_order = sorted(placed, key=lambda one: (one.begin, one.end))
        _check_layout(in_order, file.size, header.alignment, what)
        return Catalogue(
            [one.entry(file.path) for one in in_order],
            format=self.name,
            files=(file.path,),
            metadata=header.metadata.as_text(),
            notes=[f"{shown(file.path)}: {note}" for note in _notes(placed, in_order, header)],
        )

    def check_set(self, files: Sequence[File], parts: Sequence[Catalogue]) -> None:
        """Raise unless `parts`, the catalogues of `files`, are one whole model. See `gguf_split`."""
        check_split(files, parts)


class _Placed:
    """A tensor with its type and its place in the file: bytes `begin` to `end`, an empty range where unknown."""

    __slots__ = ("begin", "dtype", "end", "tensor")

    def __init__(self, tensor: GgufTensor, header: GgufHeader, what: str) -> None:
        self.tensor = tensor
        self.dtype = ggml_type(tensor.number, swapped=not header.little)
        if self.dtype.block > 1 and (not tensor.shape or tensor.shape[-1] % self.dtype.block):
            raise CorruptFile(
                f"{what}: tensor {shown(tensor.name)!r}: rows of shape {list(tensor.shape)} are not whole blocks of "
                f"{self.dtype.block} {self.dtype} elements"
            )
        if tensor.offset % header.alignment:
            raise CorruptFile(
                f"{what}: tensor {shown(tensor.name)!r} is at offset {tensor.offset:,}, which is no multiple of the "
                f"alignment {header.alignment}"
            )
        self.begin = header.data_start + tensor.offset
        self.end = self.begin + self.dtype.nbytes(tensor.shape)

    @property
    def known(self) -> bool:
        return self.dtype.kind is not Kind.UNKNOWN

    def entry(self, file: str) -> TensorEntry:
        span = Span(file, self.begin, self.end - self.begin) if self.known else None
        shape = self.tensor.shape
        if not shape and self.dtype.kind is Kind.PACKED:  # big-endian; blocks lie along a dimension
            shape = (1,)
        return TensorEntry(self.tensor.name, self.dtype, shape, (Chunk(None, span),))


def _check_layout(placed: Sequence[_Placed], size: int, alignment: int, what: str) -> None:
    """Raise where tensors, sorted by place, overlap or reach past the end of the file."""
    end, before = 0, ""
    for one in placed:
        if one.begin < min(end, one.end):
            name = shown(one.tensor.name)
            raise CorruptFile(
                f"{what}: overlap: {name!r} begins at byte {one.begin:,}, before {before!r} ends, at {end:,}"
            )
        if one.begin < one.end:
            end, before = one.end, shown(one.tensor.name)
    padded = -(-size // alignment) * alignment  # where an empty tensor may be; padding at the end may be absent
    past = [one for one in placed if one.end > (size if one.begin < one.end else padded)]
    if past:
        last = max(one.end for one in past)
        raise CorruptFile(
            f"{what}: truncated: its tensors end at byte {last:,}, the file has {size:,}, {last - size:,} are missing; "
            f"first tensor hit: {shown(past[0].tensor.name)!r}; download it again"
        )


def _notes(placed: Sequence[_Placed], in_order: Sequence[_Placed], header: GgufHeader) -> Iterator[str]:
    if not placed:
        yield "no tensors (vocabulary only?)"
    if [one.begin for one in placed] != [one.begin for one in in_order]:
        yield "its tensors lie in another order than its header lists them"
    if hole := _hole(in_order, header):
        yield hole
    if unknown := [one for one in placed if not one.known]:
        yield _unknown(unknown)


def _hole(in_order: Iterable[_Placed], header: GgufHeader) -> str | None:
    at = header.data_start
    for one in in_order:
        if not one.known:
            return None  # nobody can tell what is a hole and what is that tensor
        if one.begin - at >= header.alignment:
            return f"bytes {at:,} to {one.begin:,}, before {shown(one.tensor.name)!r}, belong to no tensor"
        at = max(at, one.end)
    return None


def _unknown(unknown: Sequence[_Placed]) -> str:
    types = ", ".join(dict.fromkeys(one.dtype.name for one in unknown))
    names = few((shown(one.tensor.name) for one in unknown), 3)
    advice = "; convert the file to little-endian (gguf-convert-endian)" if "big-endian" in types else ""
    return f"{len(unknown):,} of its tensors cannot be read, of the type {types}: {names}{advice}"
