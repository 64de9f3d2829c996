"""What ``tensorferry inspect`` says: plain data for programs, a few lines for people. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from tensorferry.checkpoint import Checkpoint
from tensorferry.core.amounts import counted, few, human_bytes
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.names import fold
from tensorferry.errors import shown

__all__ = ["inspection", "inspection_text"]

_NAME_WIDTH = 72
_METADATA = 8  # pairs that are shown


def inspection(checkpoint: Checkpoint, names: str | None = None) -> dict[str, Any]:
    """Return what `checkpoint` holds as plain data, whose keys stay as they are.

    Keys: source, format, selection, index (its path, or None), files (path, size), ignored (path, reason), metadata,
    warnings, nbytes (of all values), storage_kind, tensors. Of each tensor: name, dtype, shape, file, offset (bytes
    from the start of the file), nbytes (of the values), strides (elements; None where they are row-major).
    names: a pattern with ``*`` that the names of tensors must match.
    """
    selection = checkpoint.selection
    return {
        "source": checkpoint.uri,
        "format": checkpoint.catalogue.format,
        "selection": selection.reason,
        "index": selection.index_file,
        "files": [{"path": f.path, "size": f.size} for f in selection.files],
        "ignored": [{"path": path, "reason": why} for path, why in selection.ignored],
        "metadata": dict(checkpoint.catalogue.metadata),
        "warnings": list(checkpoint.warnings),
        "nbytes": checkpoint.catalogue.nbytes,
        "storage_kind": checkpoint.options.storage_kind,
        "tensors": [_tensor(e) for e in _matching(checkpoint, names)],
    }


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    chunk = entry.chunks[0]
    return {
        "name": entry.name,
        "dtype": entry.dtype.name,
        "shape": list(entry.shape),
        "file": chunk.span.file if chunk.span else None,
        "offset": chunk.span.offset if chunk.span else None,
        "nbytes": entry.nbytes,
        "strides": None if chunk.strides is None else list(chunk.strides),
    }


def _matching(checkpoint: Checkpoint, names: str | None) -> list[TensorEntry]:
    entries = checkpoint.catalogue.values()
    return [e for e in entries if names is None or fnmatchcase(e.name, names)]


def inspection_text(checkpoint: Checkpoint, names: str | None = None, *, every: bool = False) -> str:
    """Return what `checkpoint` holds as lines, one for each sort of tensor, or for each tensor."""
    catalogue, selection = checkpoint.catalogue, checkpoint.selection
    counts = f"{_counted(selection.files, 'file')}, {_counted(catalogue, 'tensor')}"
    head = f"{catalogue.format}, {counts}, {human_bytes(catalogue.nbytes)}"
    lines = [
        f"{shown(checkpoint.uri, 300)}: {head}",
        f"files: {shown(selection.reason, 1000)}",
        *_storage(checkpoint),
        *_tensor_lines(matching := _matching(checkpoint, names), every=every),
        *([f"matching: {_counted(matching, 'tensor')}, {_size(matching)}"] if names is not None else []),
        f"types: {_types(catalogue.values())}",
        *([f"metadata: {_metadata(list(catalogue.metadata.items()))}"] if catalogue.metadata else []),
        *(f"not used: {shown(path)} ({shown(why)})" for path, why in selection.ignored),
        *(f"warning: {shown(warning, 1000)}" for warning in checkpoint.warnings),
    ]
    return "\n".join(lines)


def _storage(checkpoint: Checkpoint) -> list[str]:
    options = checkpoint.options
    if options.storage_kind == "local":
        return []
    most, gap = human_bytes(options.max_read), human_bytes(options.max_gap)
    return [f"storage: {options.storage_kind}, read at most {most} at a time, over holes of at most {gap}"]


def _counted(things: Sized, what: str) -> str:
    return counted(len(things), what)


def _size(entries: Iterable[TensorEntry]) -> str:
    return human_bytes(sum(e.nbytes for e in entries))


class _Row(NamedTuple):
    name: str
    kind: str
    size: str


def _tensor_lines(entries: Sequence[TensorEntry], *, every: bool) -> list[str]:
    if not entries:
        return ["  no tensor matches"]
    rows = [_row([e], e.name) for e in entries] if every else list(_folded(entries))
    width = min(max(len(row.name) for row in rows), _NAME_WIDTH)
    kinds = max(len(row.kind) for row in rows)
    return [f"  {row.name:<{width}}  {row.kind:<{kinds}}  {row.size:>10}" for row in rows]


def _folded(entries: Iterable[TensorEntry]) -> Iterable[_Row]:
    sorts: dict[tuple[str, tuple[int, ...]], dict[str, TensorEntry]] = {}
    for entry in entries:
        sorts.setdefault((entry.dtype.name, entry.shape), {})[entry.name] = entry
    for members in sorts.values():
        for folded in fold(members):
            yield _row([members[name] for name in folded.names], folded.text)


def _row(entries: Sequence[TensorEntry], name: str) -> _Row:
    many = f"{len(entries):,} x " if len(entries) > 1 else ""
    kind = f"{many}{entries[0].dtype.name} {list(entries[0].shape)}"
    return _Row(shown(name, 200), kind, _size(entries))


def _types(entries: Iterable[TensorEntry]) -> str:
    types = Counter[str]()
    for entry in entries:
        types[entry.dtype.name] += entry.nbytes
    return ", ".join(f"{name} {human_bytes(n)}" for name, n in types.most_common()) or "none"


def _metadata(pairs: Sequence[tuple[str, str]]) -> str:
    return few((f"{shown(key, 60)} = {shown(value, 60)}" for key, value in pairs), _METADATA)
