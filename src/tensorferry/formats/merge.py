"""Makes one catalogue of the headers of several files, and holds it against the shard index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tensorferry.core.amounts import few
from tensorferry.core.catalogue import Catalogue, Chunk, Span, TensorEntry
from tensorferry.errors import CorruptFile, FormatError, shown
from tensorferry.formats.base import Selection
from tensorferry.storage.base import Storage
from tensorferry.storage.reading import ReadInto

__all__ = ["merge", "same_values"]

_BLOCK = 4 << 20


def merge(storage: Storage, selection: Selection, parts: Sequence[Catalogue]) -> Catalogue:
    """Return one catalogue of `parts`, the headers of ``selection.files`` in that order; entries are not copied.

    A name in several files is kept once, with a note, if dtype, shape and bytes are equal (the bytes are read and
    compared): the one in the file that the index says, else the first. Where files say different things of
    themselves, the first one's metadata wins. Names that the index lacks are kept, with a note.

    Raises FormatError where one name has different values in two files, naming both; CorruptFile where a tensor of
    the index is not in the file that it says.
    """
    if len(parts) == 1 and selection.index is None:
        return parts[0]
    entries: dict[str, TensorEntry] = {}
    places: dict[str, str] = {}
    notes: list[str] = [note for part in parts for note in part.notes]
    for file, part in zip(selection.files, parts, strict=True):
        fresh = dict(part)
        twice = sorted(entries.keys() & fresh.keys())
        if twice:
            notes += _settle(storage, selection, file.path, twice, (entries, places, fresh))
        entries.update(fresh)
        places.update(dict.fromkeys(fresh, file.path))
    if selection.index is not None and places != selection.index:
        notes += _against_index(selection.index, selection.index_file or "the index", places)
    metadata = {key: value for part in reversed(parts) for key, value in part.metadata.items()}
    return Catalogue(
        entries.values(),
        format=parts[0].format,
        files=[file.path for file in selection.files],
        metadata=metadata,
        notes=dict.fromkeys(notes),
    )


def same_values(read_into: ReadInto, one: TensorEntry, other: TensorEntry) -> bool:
    """Tell whether two entries have one dtype, shape and layout and equal bytes.

    Reads both, block by block, with a function like `Storage.read_into`; nothing where they are the same bytes.
    """
    if (one.dtype, one.shape, len(one.chunks)) != (other.dtype, other.shape, len(other.chunks)):
        return False
    if one.made is not None and other.made is not None and one.made.via == other.made.via:
        pairs = zip(one.lying, other.lying, strict=True)
        return all(same_values(read_into, a, b) for a, b in pairs)
    if (one.made and one.made.via) != (other.made and other.made.via):
        return False
    return all(_same_chunk(read_into, a, b) for a, b in zip(one.chunks, other.chunks, strict=True))


def _settle(
    storage: Storage,
    selection: Selection,
    file: str,
    twice: Iterable[str],
    state: tuple[dict[str, TensorEntry], dict[str, str], dict[str, TensorEntry]],
) -> list[str]:
    """Leave each name of `twice` in one place only, known before or fresh from `file`; return notes about it."""
    entries, places, fresh = state
    settled: dict[tuple[str, str], list[str]] = {}
    for name in twice:
        other = places[name]
        if not same_values(storage.read_into, entries[name], fresh[name]):
            raise _different(name, other, entries[name], file, fresh[name])
        if selection.index is not None and selection.index.get(name) == file:
            del entries[name], places[name]
            settled.setdefault((file, other), []).append(name)
        else:
            del fresh[name]
            settled.setdefault((other, file), []).append(name)
    return [
        f"{_tensors(names)} in {shown(kept)} and again in {shown(spare)}, with equal bytes: the former is used"
        for (kept, spare), names in settled.items()
    ]


def _different(name: str, one_file: str, one: TensorEntry, other_file: str, other: TensorEntry) -> FormatError:
    kinds = [f"{entry.dtype.name} {list(entry.shape)}" for entry in (one, other)]
    found = f"{kinds[0]} and {kinds[1]}" if kinds[0] != kinds[1] else "the same shape and different bytes"
    return FormatError(
        f"duplicate name: tensor {shown(name)!r} is in {shown(one_file)} and in {shown(other_file)}, with {found};"
        " load one of the two files, or keep the right ones with allow_patterns"
    )


def _same_chunk(read_into: ReadInto, one: Chunk, other: Chunk) -> bool:
    if one.span is None or other.span is None or (one.box, one.strides) != (other.box, other.strides):
        return False
    return one.span.length == other.span.length and (
        one.span == other.span or _same_bytes(read_into, one.span, other.span)
    )


def _same_bytes(read_into: ReadInto, one: Span, other: Span) -> bool:
    size = min(one.length, _BLOCK)
    left, right = memoryview(bytearray(size)), memoryview(bytearray(size))
    for done in range(0, one.length, _BLOCK):
        length = min(_BLOCK, one.length - done)
        read_into(one.file, one.offset + done, left[:length])
        read_into(other.file, other.offset + done, right[:length])
        if left[:length] != right[:length]:
            return False
    return True


def _against_index(index: dict[str, str], index_file: str, places: dict[str, str]) -> list[str]:
    """Raise CorruptFile if a tensor is not where the index says; return a note about those that it lacks."""
    absent = [name for name in index if name not in places]
    if absent:
        raise CorruptFile(
            f"{shown(index_file)}: says that tensor {shown(absent[0])!r} is in {shown(index[absent[0]])}, where it is"
            f" not{_and_more(len(absent) - 1)}: index and shards are not of the same checkpoint"
        )
    astray = [name for name, file in index.items() if places[name] != file]
    if astray:
        name = astray[0]
        raise CorruptFile(
            f"{shown(index_file)}: says that tensor {shown(name)!r} is in {shown(index[name])}, and it is in"
            f" {shown(places[name])}{_and_more(len(astray) - 1)}: index and shards are not of the same checkpoint"
        )
    extra = [name for name in places if name not in index]
    return [f"{_tensors(extra)} in the files but not in {shown(index_file)}: kept"]


def _tensors(names: Sequence[str]) -> str:
    listed = few(map(shown, names), 3)
    return f"tensor {listed} is" if len(names) == 1 else f"{len(names)} tensors ({listed}) are"


def _and_more(count: int) -> str:
    return f" (and {count} more like it)" if count else ""
