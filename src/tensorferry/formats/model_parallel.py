"""Joins the parts that model-parallel training wrote (Meta's ``consolidated.NN.pth``) into one catalogue.

Each tensor is cut into equal parts along one of its dimensions, or copied. Sources: the layers of Meta's reference
implementation, by which output rows (column-parallel), input columns (row-parallel) or the vocabulary are divided.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tensorferry.core.amounts import counted
from tensorferry.core.boxes import Box, Shape
from tensorferry.core.catalogue import Catalogue, Chunk, TensorEntry
from tensorferry.errors import CorruptFile, FormatError, shown
from tensorferry.formats.base import Selection
from tensorferry.formats.merge import merge, same_values
from tensorferry.formats.params_json import PARAMS_FILE, Params, Widths, read_params
from tensorferry.storage.base import Storage

__all__ = ["join"]

ROWS, COLUMNS = 0, 1

_SHAPES = {
    "tok_embeddings": ("", "dim"), "output": ("", "dim"),
    "attention.wq": ("queries", "dim"), "attention.wk": ("keys", "dim"), "attention.wv": ("keys", "dim"),
    "attention.wo": ("dim", "queries"), "feed_forward.w1": ("hidden", "dim"), "feed_forward.w2": ("dim", "hidden"),
    "feed_forward.w3": ("hidden", "dim"),
}  # fmt: skip
"""Which of `Widths` the rows and columns of a tensor have; "" for the vocabulary, which files pad as they like."""

_CUT_BY_COLUMNS = ("attention.wo", "feed_forward.w2")
_COPIED = (
    "attention_norm", "ffn_norm", "norm", "feed_forward.gate", "rope.freqs", "attention.inner_attention.rope.freqs"
)  # fmt: skip
_QUERIES = re.compile(r"layers\.\d+\.attention\.wq\.weight")
_LEAF = re.compile(r"(?:layers\.\d+\.)?(?P<leaf>.+?)(?:\.weight)?")
_EXPERT = re.compile(r"\.experts\.\d+")


def join(storage: Storage, selection: Selection, parts: Sequence[Catalogue]) -> Catalogue:
    """Return one catalogue of whole tensors, whose chunks lie in the files of the selection, in that order.

    Copies that every part holds are read and compared. Files with other names than Meta's, or of which none holds a
    name that another one has, are merged as ordinary files are.

    Raises CorruptFile where a part lacks a tensor or has it in another shape, where copies differ, or where the number
    of parts does not fit the sizes in params.json; FormatError for a tensor of which it is not known how it is cut.
    """
    first = parts[0]
    queries = next((name for name in first if _QUERIES.fullmatch(name)), None)
    shared = set(first).intersection(*parts[1:]) if len(parts) > 1 else set(first)
    if queries is None or not shared:
        return merge(storage, selection, parts)
    params = read_params(storage)
    files = tuple(file.path for file in selection.files)
    joining = _Joining(storage, files, params, _widths(params, first[queries], len(parts)))
    _refuse_lacking(files, parts)
    joining.entry(queries, [part[queries] for part in parts])  # tells a wrong number of parts best
    entries = [joining.entry(name, [part[name] for part in parts]) for name in first]
    notes = dict.fromkeys((*(note for part in parts for note in part.notes), *joining.notes))
    return Catalogue(entries, format=first.format, files=files, metadata=first.metadata, notes=notes)


def _widths(params: Params | None, queries: TensorEntry, count: int) -> Widths:
    """Return the extents of whole tensors; without params.json, what the first parts tell."""
    if params is not None and (said := params.widths()).dim is not None:
        return said
    dim = queries.shape[COLUMNS] if len(queries.shape) == 2 else None
    return Widths(dim, queries=dim if count > 1 else None)


def _refuse_lacking(files: Sequence[str], parts: Sequence[Catalogue]) -> None:
    names = set(parts[0])
    for file, part in zip(files[1:], parts[1:], strict=True):
        for name in (*(n for n in parts[0] if n not in part), *(n for n in part if n not in names)):
            there, absent = (files[0], file) if name in names else (file, files[0])
            raise CorruptFile(
                f"{shown(absent)}: no tensor {shown(name)!r}, of which {shown(there)} holds a part: they are not parts "
                "of one checkpoint, or one of them is damaged"
            )


@dataclass
class _Joining:
    """What is known of all parts. notes: what a reader should be told, gathered on the way."""

    storage: Storage
    files: Sequence[str]
    params: Params | None
    widths: Widths
    notes: list[str] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)

    def entry(self, name: str, pieces: Sequence[TensorEntry]) -> TensorEntry:
        """Return the tensor that `pieces`, one of each file, make up."""
        match = _LEAF.fullmatch(name)
        leaf = _EXPERT.sub("", match["leaf"]) if match is not None else name
        self._refuse_unlike(name, pieces)
        if leaf in _COPIED:
            self._refuse_differing(name, list(enumerate(pieces)))
            return pieces[0]
        if leaf in _SHAPES:
            axis = self._axis(name, leaf, pieces[0])
            return _beside(self._distinct(name, leaf, pieces, axis), axis)
        if len(pieces) == 1:
            return pieces[0]
        raise FormatError(
            f"{shown(name)}: how this tensor is cut into {len(pieces)} parts is not known here; in "
            f"{shown(self.files[0])} it is {list(pieces[0].shape)}"
        )

    def _refuse_unlike(self, name: str, pieces: Sequence[TensorEntry]) -> None:
        kinds = [(piece.dtype, piece.shape) for piece in pieces]
        other = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None:
            found = [
                f"{dtype} {list(shape)} in {shown(self.files[n])}" for n in (0, other) for dtype, shape in [kinds[n]]
            ]
            raise CorruptFile(
                f"{shown(name)}: {' and '.join(found)}: the parts of one tensor have one shape and type, so these are "
                "not parts of one checkpoint"
            )

    def _refuse_differing(self, name: str, copies: Sequence[tuple[int, TensorEntry]]) -> None:
        first, piece = copies[0]
        for n, other in copies[1:]:
            if not same_values(self.storage.read_into, piece, other):
                raise CorruptFile(
                    f"{shown(name)}: {shown(self.files[first])} and {shown(self.files[n])} should hold the same "
                    "values, and do not: they are not parts of one checkpoint"
                )

    def _axis(self, name: str, leaf: str, piece: TensorEntry) -> int:
        """Return along which dimension a tensor is cut. Embeddings: columns until Llama 2, the vocabulary since."""
        if len(piece.shape) != 2:
            raise CorruptFile(f"{shown(name)}: a matrix is expected, found {list(piece.shape)}")
        axis = COLUMNS if leaf in _CUT_BY_COLUMNS else ROWS
        if leaf == "tok_embeddings" and piece.shape[COLUMNS] != self.widths.dim:
            axis = COLUMNS
        across = self._expected(leaf, 1 - axis)
        if across is not None and piece.shape[1 - axis] != across:
            raise CorruptFile(
                f"{self._misfit(name, piece, 1 - axis, across)}: the files are of another model, or damaged"
            )
        return axis

    def _expected(self, leaf: str, axis: int) -> int | None:
        found: int | None = getattr(self.widths, _SHAPES[leaf][axis], None)
        return found

    def _distinct(self, name: str, leaf: str, pieces: Sequence[TensorEntry], axis: int) -> Sequence[TensorEntry]:
        """Return the pieces that differ: all of them, or one for each head where there are more parts than heads."""
        whole, extent, count = self._expected(leaf, axis), pieces[0].shape[axis], len(pieces)
        if whole is None or extent * count == whole:
            return pieces
        times, rest = divmod(extent * count, whole)
        if rest or not times or count % times or not self._repeats_heads(leaf, extent):
            raise self._wrong_count(name, pieces[0], axis, whole)
        if leaf not in self.compared:  # one layer tells in which order heads are repeated
            self.compared.add(leaf)
            for at in range(0, count, times):
                self._refuse_differing(name, [(n, pieces[n]) for n in range(at, at + times)])
        self.notes.append(f"{counted(count, 'part')} hold every head of keys and values {times} times: one is used")
        return pieces[::times]

    def _repeats_heads(self, leaf: str, extent: int) -> bool:
        """Whether parts may share heads: each holds just one head of keys or values."""
        head = self.params.head_dim() if self.params is not None else None
        return leaf in ("attention.wk", "attention.wv") and extent == head

    def _wrong_count(self, name: str, piece: TensorEntry, axis: int, whole: int) -> CorruptFile:
        extent, count = piece.shape[axis], len(self.files)
        parts, rest = divmod(whole, extent) if extent else (0, 1)
        advice = "the files are of another model, or damaged"
        if not rest:
            advice = f"{counted(parts, 'part')} of that size {_is(parts)} expected, and there {_is(count)} {count}"
        where = shown(self.storage.uri, 300)
        return CorruptFile(f"{where}: {self._misfit(name, piece, axis, whole, count)}: {advice}")

    def _misfit(self, name: str, piece: TensorEntry, axis: int, expected: int, count: int = 1) -> str:
        extent, what = piece.shape[axis], "rows" if axis == ROWS else "columns"
        found = f"{count} parts of {extent:,} {what}" if count > 1 else f"{extent:,} {what}"
        said = f"{PARAMS_FILE} makes it {expected:,}" if self.params is not None else f"it should be {expected:,}"
        return f"{shown(name)}: {found}, and {said}"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _beside(pieces: Sequence[TensorEntry], axis: int) -> TensorEntry:
    """Return the tensor that `pieces`, of one shape, are when they lie side by side along `axis`."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    extent = first.shape[axis]
    chunks = tuple(
        Chunk((chunk.box or Box.whole(piece.shape)).shift(_at(axis, n * extent, 2)), chunk.span, chunk.strides)
        for n, piece in enumerate(pieces)
        for chunk in piece.chunks
    )
    shape = tuple(n * len(pieces) if d == axis else n for d, n in enumerate(first.shape))
    return TensorEntry(first.name, first.dtype, shape, chunks)


def _at(axis: int, offset: int, rank: int) -> Shape:
    return tuple(offset if d == axis else 0 for d in range(rank))
