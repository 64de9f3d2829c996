"""What a checkpoint holds, known from its headers alone: entries, and where their bytes are."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from tensorferry.core.boxes import Box, Shape, strides_of
from tensorferry.core.dtypes import DType, Kind
from tensorferry.core.transforms import Transform
from tensorferry.errors import FormatError, UnsupportedDtype, shown

__all__ = ["Catalogue", "Chunk", "Made", "Span", "TensorEntry", "refuse_unknown"]


class Span(NamedTuple):
    """`length` contiguous bytes of `file` (a path relative to its storage) from `offset`."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """Part of an entry and its bytes.

    box: the part, or None for all of the entry.
    span: its bytes; None where only the format can produce them (compressed, encrypted).
    strides: in elements from the start of the span; None for row-major. Torch files hold views.
    """

    box: Box | None
    span: Span | None
    strides: Shape | None = None


class Made(NamedTuple):
    """How an entry that lies in no file is made: of whole `inputs` through `via`, or as one input, renamed."""

    inputs: tuple[TensorEntry, ...]
    via: Transform | None = None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as it lies in a checkpoint. `chunks` cover it exactly once; ordinary files have one.

    made: of an entry that a name map adds, in place of chunks: which entries it is made of, and how.
    """

    name: str
    dtype: DType
    shape: Shape
    chunks: tuple[Chunk, ...]
    digest: str | None = None
    made: Made | None = None

    @classmethod
    def at(
        cls,
        name: str,
        dtype: DType,
        shape: Shape,
        file: str,
        offset: int,
        *,
        strides: Shape | None = None,
        length: int | None = None,
    ) -> TensorEntry:
        """Return an entry with one chunk: bytes from `offset` of `file`, `length` of them (else by shape)."""
        size = dtype.nbytes(shape) if length is None else length
        natural = strides is None or strides == strides_of(shape)
        return cls(name, dtype, shape, (Chunk(None, Span(file, offset, size), None if natural else strides),))

    @property
    def nbytes(self) -> int:
        """Bytes of the values, however they are stored."""
        return self.dtype.nbytes(self.shape)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that hold its bytes, each once."""
        return tuple(dict.fromkeys(c.span.file for e in self.lying for c in e.chunks if c.span is not None))

    @property
    def lying(self) -> tuple[TensorEntry, ...]:
        """The entries whose bytes it takes to have this one: itself, or what it is made of."""
        return (self,) if self.made is None else tuple(one for entry in self.made.inputs for one in entry.lying)

    @property
    def span(self) -> Span | None:
        """Its bytes where they are one row-major span, else None."""
        if len(self.chunks) == 1 and self.chunks[0].strides is None:
            return self.chunks[0].span
        return None


class Catalogue(Mapping[str, TensorEntry]):
    """All entries of a checkpoint by name, immutable, in storage order.

    format: the name of the format that read it. files: the files it lies in.
    metadata: what the files say beside their tensors, text to text. notes: what a reader should be told
    (nested state unwrapped, values left out), one sentence each.
    """

    __slots__ = ("_entries", "files", "format", "metadata", "notes")

    def __init__(
        self,
        entries: Iterable[TensorEntry],
        *,
        format: str,
        files: Iterable[str] = (),
        metadata: Mapping[str, str] = MappingProxyType({}),
        notes: Iterable[str] = (),
    ) -> None:
        found: dict[str, TensorEntry] = {}
        for entry in entries:
            if found.setdefault(entry.name, entry) is not entry:
                where = " and ".join(dict.fromkeys((*found[entry.name].files, *entry.files)))
                raise FormatError(f"tensor {shown(entry.name)!r} is there twice, in {where}: remove one of them")
        self._entries = found
        self.format = format
        self.files = tuple(files)
        self.metadata = MappingProxyType(dict(metadata))
        self.notes = tuple(notes)

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> ItemsView[str, TensorEntry]:
        return self._entries.items()

    def values(self) -> ValuesView[TensorEntry]:
        return self._entries.values()

    def __repr__(self) -> str:
        return f"<Catalogue {self.format}: {len(self)} tensors, {self.nbytes:,} bytes, {len(self.files)} files>"

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum([e.dtype.nbytes(e.shape) for e in self._entries.values()])

    def replacing(self, entries: Iterable[TensorEntry], *, notes: Iterable[str] = ()) -> Catalogue:
        """Return a catalogue of other `entries` over the same files, with `notes` added."""
        return Catalogue(
            entries, format=self.format, files=self.files, metadata=self.metadata, notes=(*self.notes, *notes)
        )


def refuse_unknown(entries: Iterable[TensorEntry]) -> None:
    """Raise UnsupportedDtype if the type of an entry is not known, so that nothing can read it; naming both."""
    unknown = [e for e in entries if e.dtype.kind is Kind.UNKNOWN]
    if unknown:
        more = f" (and {len(unknown) - 1} more like it)" if len(unknown) > 1 else ""
        raise UnsupportedDtype(
            f"tensor {shown(unknown[0].name)!r} has the type {shown(unknown[0].dtype.name)!r}, which cannot be read"
            f" here{more}; other tensors can"
        )
