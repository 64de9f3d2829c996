"""What ``tensorferry inspect`` says: plain data for programs, a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import typer

from tensorferry.checkpoint import Checkpoint
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.explain import human_bytes
from tensorferry.core.names import fold
from tensorferry.errors import shown

__all__ = ["inspection", "inspection_table"]


def inspection(checkpoint: Checkpoint, names: str | None = None) -> dict[str, Any]:
    """Return what `checkpoint` holds. Keys: source, format, selection, files, ignored, metadata, warnings, tensors.

    files: path, size. tensors: name, dtype, shape, file, offset (bytes in the file), nbytes (of the values), and
    strides (elements) where the bytes are not row-major. names: a pattern with ``*`` that tensors must match.
    """
    selection = checkpoint.selection
    return {
        "source": checkpoint.uri,
        "format": checkpoint.catalogue.format,
        "selection": selection.reason,
        "files": [{"path": f.path, "size": f.size} for f in selection.files],
        "ignored": [{"path": path, "reason": why} for path, why in selection.ignored],
        "metadata": dict(checkpoint.catalogue.metadata),
        "warnings": list(checkpoint.warnings),
        "tensors": [_tensor(e) for e in _matching(checkpoint, names)],
    }


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    chunk = entry.chunks[0]
    out: dict[str, Any] = {"name": entry.name, "dtype": entry.dtype.name, "shape": list(entry.shape)}
    if chunk.span is not None:
        out |= {"file": chunk.span.file, "offset": chunk.span.offset}
    out["nbytes"] = entry.nbytes
    if chunk.strides is not None:
        out["strides"] = list(chunk.strides)
    return out


def _matching(checkpoint: Checkpoint, names: str | None) -> Iterable[TensorEntry]:
    return (e for e in checkpoint.catalogue.values() if names is None or fnmatchcase(e.name, names))


def inspection_table(checkpoint: Checkpoint, names: str | None = None, *, every: bool = False) -> None:
    """Print what `checkpoint` holds: one line for each sort of tensor, or for each tensor."""
    catalogue, files = checkpoint.catalogue, checkpoint.selection.files
    count = f"{len(files)} file" + ("s" if len(files) != 1 else "")
    typer.echo(
        f"{checkpoint.uri}: {catalogue.format}, {count}, {len(catalogue):,} tensors, {human_bytes(catalogue.nbytes)}"
    )
    typer.echo(f"{checkpoint.selection.reason}")
    for line in _lines(_matching(checkpoint, names), every=every):
        typer.echo("  " + line)
    for path, why in checkpoint.selection.ignored:
        typer.echo(f"not used: {path} ({why})")
    for warning in checkpoint.warnings:
        typer.echo(f"warning: {warning}")
    types = Counter[str]()
    for entry in catalogue.values():
        types[entry.dtype.name] += entry.nbytes
    typer.echo("types: " + (", ".join(f"{name} {human_bytes(n)}" for name, n in types.most_common()) or "none"))


def _lines(entries: Iterable[TensorEntry], *, every: bool) -> Iterable[str]:
    groups: dict[tuple[str, tuple[int, ...]], list[TensorEntry]] = {}
    for number, entry in enumerate(entries):
        key = (entry.dtype.name, entry.shape)
        groups.setdefault((f"{key[0]}#{number}", key[1]) if every else key, []).append(entry)
    rows = []
    for (dtype, shape), members in groups.items():
        size = {e.name: e.nbytes for e in members}
        for folded in fold(size):
            total = human_bytes(sum(size[n] for n in folded.names))
            many = f"{len(folded.names)} x " if len(folded.names) > 1 else ""
            rows.append((shown(folded.text, 200), f"{many}{dtype.partition('#')[0]} {list(shape)}", total))
    width = min(max((len(r[0]) for r in rows), default=0), 72)
    kinds = max((len(r[1]) for r in rows), default=0)
    return [f"{name:<{width}}  {kind:<{kinds}}  {total:>10}" for name, kind, total in rows]
