"""NumPy caches: ``np/`` in the folder of a torch checkpoint, one .npy file for each tensor, as vLLM lays it out.

Decides whether a cache is the one of the checkpoint beside it, and makes the catalogue. What builds caches is
`npcache_write`, and the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tensorferry.core.amounts import few
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DType, Kind
from tensorferry.errors import CorruptFile, FormatError, LocateError, UnsupportedDtype, shown
from tensorferry.formats.base import Selection
from tensorferry.formats.file_names import parse_index_name, parse_weight_name
from tensorferry.formats.merge import merge
from tensorferry.formats.npcache_record import (
    FOLDER,
    NAMES,
    RECORD,
    CachedTensor,
    CacheRecord,
    SourceFile,
    path_of,
    read_names,
    read_record,
)
from tensorferry.formats.npy import NPY_DTYPES, items_of
from tensorferry.formats.torch_file import TorchFileFormat
from tensorferry.storage.base import File, Storage

__all__ = ["CacheSelection", "array_shape", "array_type", "catalogue_of", "select_npcache", "sources_of"]

_SHARED = frozenset(NPY_DTYPES.values())
_HOW = "get_model_loader(LoadConfig(load_format='npcache')) builds it, and so does tensorferry.loaders.build_npcache"


@dataclass(frozen=True, slots=True)
class CacheSelection(Selection):
    """A cache as what is to be read. record: ours, if there is one. originals: what lies beside it, if anything."""

    record: CacheRecord | None = None
    originals: Selection | None = None


def select_npcache(storage: Storage, choose: Callable[[], Selection]) -> CacheSelection:
    """Return the cache in ``np/`` of `storage`, of the files that `choose` returns of what lies beside it.

    Without a record of ours, as vLLM leaves a cache, it must be younger than those files; `catalogue_of` compares more.

    Raises LocateError where there is none, or none of those files as they are now; CorruptFile where it is not whole;
    and what `choose` raises, unless there are no weights of any kind beside a cache.
    """
    originals = _originals(storage, choose)
    record, names, listed = _contents(storage, originals)
    now = () if originals is None else sources_of(storage, originals)
    warnings = _foreign(storage, listed, now) if record is None else _ours(storage, record, now)
    files = tuple(storage.stat(path_of(file)) for file in names)
    return CacheSelection(
        "npy",
        files,
        f"{path_of(NAMES)} lists the {len(files)} files of the NumPy cache",
        index_file=path_of(NAMES),
        warnings=tuple(warnings),
        layout="npcache",
        record=record,
        originals=originals,
    )


def sources_of(storage: Storage, originals: Selection) -> tuple[SourceFile, ...]:
    """Return what tells the files of a checkpoint, its index among them, from others and from later ones."""
    index = [storage.stat(originals.index_file)] if originals.index_file is not None else []
    return tuple(SourceFile(file.path, file.size, _mtime(file)) for file in (*index, *originals.files))


def catalogue_of(storage: Storage, selection: Selection, parts: Sequence[Catalogue]) -> Catalogue:
    """Return the catalogue of a cache from the headers of its files: the layout "npcache".

    Raises CorruptFile where a file is not what the record says, LocateError where a cache without one has not the
    names, types and shapes of the checkpoint beside it.
    """
    chosen = cast("CacheSelection", selection)
    arrays = {file.path: part[file.path] for file, part in zip(chosen.files, parts, strict=True)}
    if chosen.record is not None:
        held = {path_of(file): told for file, told in chosen.record.tensors.items()}
        entries = [_as_told(arrays[path], told, storage) for path, told in held.items()]
    else:
        entries = [replace(array, name=path.removeprefix(f"{FOLDER}/")) for path, array in arrays.items()]
        if chosen.originals is not None:
            _refuse_difference(storage, entries, chosen.originals)
    return Catalogue(
        entries,
        format="npcache",
        files=[file.path for file in chosen.files],
        metadata=chosen.record.metadata if chosen.record is not None else {},
    )


def array_type(dtype: DType) -> DType:
    """Return the type of the array that holds elements of `dtype`: itself, or items that are its blocks, as bits.

    NumPy has neither bfloat16 nor the eight-bit floats. Raw items, which it spells ``V2``, are what arrays of ml_dtypes
    are saved as, and what torch refuses to take for numbers.
    """
    return dtype if dtype in _SHARED else items_of(dtype.block_bytes)


def array_shape(dtype: DType, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in items of the array that holds a tensor; raises UnsupportedDtype where rows are cut."""
    if dtype.kind is Kind.UNKNOWN or (dtype.block > 1 and (not shape or shape[-1] % dtype.block)):
        raise UnsupportedDtype(f"{dtype} of shape {list(shape)} is not made of whole items")
    return tuple(shape) if dtype.block == 1 else (*shape[:-1], shape[-1] // dtype.block)


def _originals(storage: Storage, choose: Callable[[], Selection]) -> Selection | None:
    """Return the checkpoint that lies beside the cache, or None where no weights do."""
    try:
        return choose()
    except LocateError:
        if any(map(_is_weights, storage.list())) or not _is_there(storage, NAMES):
            raise
        return None


def _is_there(storage: Storage, file: str) -> bool:
    try:
        storage.stat(path_of(file))
    except LocateError:
        return False
    return True


def _is_weights(file: File) -> bool:
    weights, index = parse_weight_name(file.path), parse_index_name(file.path)
    return index is not None or (weights is not None and not weights.role)


def _contents(storage: Storage, originals: Selection | None) -> tuple[CacheRecord | None, list[str], File]:
    """Return our record, if there is one, the names of the cache's files, and the list of these."""
    try:
        listed = storage.stat(path_of(NAMES))
    except LocateError as error:
        beside = "" if originals is None else f" of {_listed(file.path for file in originals.files)}"
        raise LocateError(f"{error}: there is no finished NumPy cache{beside}; {_HOW}") from None
    names = read_names(storage, listed)
    try:
        file = storage.stat(path_of(RECORD))
    except LocateError:
        return None, names, listed
    record = read_record(storage, file)
    if list(record.tensors) != names:
        raise CorruptFile(
            f"{shown(storage.uri, 300)}: {path_of(NAMES)} and {path_of(RECORD)} are of two caches; {_HOW}"
        )
    return record, names, listed


def _ours(storage: Storage, record: CacheRecord, now: Sequence[SourceFile]) -> Iterator[str]:
    """Yield warnings about a cache that says what it was made of; LocateError where that is not what is there."""
    if now and tuple(record.sources) != tuple(now):
        raise LocateError(f"{shown(storage.uri, 300)}: {FOLDER}/ is stale: {_change(record.sources, now)}; {_HOW}")
    if record.sources and not now:
        yield f"{_listed(s.name for s in record.sources)}, of which {FOLDER}/ was made, cannot be compared: not there"


def _foreign(storage: Storage, listed: File, now: Sequence[SourceFile]) -> Iterator[str]:
    """Yield warnings about a cache of another program; LocateError where its list is not younger than all sources."""
    for source in now:
        if source.mtime_ns >= _mtime(listed):
            raise LocateError(
                f"{shown(storage.uri, 300)}: {FOLDER}/ is stale: {shown(source.name)} is younger than it; {_HOW}"
            )
    why = "and there is nothing to compare it with"
    if now:
        files = _listed(source.name for source in now)
        why = f"taken for whole because it is younger than {files}, with equal names, types and shapes"
    yield f"{FOLDER}/ has no {RECORD} that says what it was made of: {why}"


def _as_told(array: TensorEntry, told: CachedTensor, storage: Storage) -> TensorEntry:
    """Return `array` as the tensor that the record says it is."""
    expected = array_type(told.dtype), array_shape(told.dtype, told.shape)
    strided = array.chunks[0].strides is not None and told.dtype.block > 1
    if (array.dtype, array.shape) != expected or strided:
        path = array.files[0]
        raise CorruptFile(
            f"{shown(path)} ({shown(storage.uri, 300)}): {array.dtype} of shape {list(array.shape)}, where"
            f" {path_of(RECORD)} says {told.dtype} of shape {list(told.shape)}"
        )
    return replace(array, name=told.name, dtype=told.dtype, shape=told.shape)


def _refuse_difference(storage: Storage, entries: Sequence[TensorEntry], originals: Selection) -> None:
    """Raise LocateError unless `entries` have the names, types and shapes of the checkpoint that they were made of."""
    parts = [TorchFileFormat().catalogue(storage, file) for file in originals.files]
    wanted = _kinds(merge(storage, originals, parts).values())
    found = _kinds(entries)
    if wanted != found:
        name = next(n for n in (*wanted, *found) if wanted.get(n) != found.get(n))
        where = f"{shown(storage.uri, 300)}: {FOLDER}/ is not that of {_listed(file.path for file in originals.files)}"
        raise LocateError(
            f"{where}: tensor {shown(name)!r} is {_kind(wanted.get(name))} there and {_kind(found.get(name))} in the"
            f" cache; {_HOW}"
        )


_Kind = tuple[DType, tuple[int, ...]]


def _kinds(entries: Iterable[TensorEntry]) -> Mapping[str, _Kind]:
    return {entry.name: (entry.dtype, entry.shape) for entry in entries}


def _kind(kind: _Kind | None) -> str:
    return "absent" if kind is None else f"{kind[0]} {list(kind[1])}"


def _change(before: Sequence[SourceFile], now: Sequence[SourceFile]) -> str:
    """Return in words the first difference between what a cache was made of and what is there."""
    known = {source.name: source for source in before}
    for source in now:
        old = known.pop(source.name, None)
        if old is None:
            return f"{shown(source.name)} is new"
        if old.size != source.size:
            return f"{shown(source.name)} had {old.size} bytes when it was made, and has {source.size}"
        if old != source:
            return f"{shown(source.name)} was written to since it was made"
    return f"{_listed(known)} went since it was made" if known else "the files come in another order"


def _mtime(file: File) -> int:
    """Return when a file was last written to; only files of this machine have caches."""
    if isinstance(file.identity, str) or len(file.identity) < 4:
        raise FormatError(f"{shown(file.path)}: where it lies, nothing tells when it was written: no cache can be kept")
    return file.identity[3]


def _listed(names: Iterable[str]) -> str:
    return few(map(shown, names), 1)
