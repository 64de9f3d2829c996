"""What a conversion did, or would do, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tensorferry.core.amounts import counted, few, human_bytes
from tensorferry.core.names import fold
from tensorferry.errors import shown
from tensorferry.report import by_reason, plain

__all__ = ["Conversion"]

_NAMES = 4  # folded names on one line
_FILES = 8
_LINE = 1000  # characters


@dataclass(frozen=True, slots=True)
class Conversion:
    """The account of a conversion. Names are those that are written, but for `dropped`, which has the source's.

    dry_run: nothing was written. files: the weights and their index, with their sizes in bytes; empty where only
    writing tells. side_files: configuration, tokenizer, code; path to what was done. left_behind: files of the source
    that were not taken along, to why. tensors: how many were written; nbytes: of their values.
    dropped: entries of the source that nothing was made of, to why. casts: "F32 -> BF16" to how many tensors.
    kept: tensors that did not get the type that was asked for, to why. losses: tensor to (overflow, underflow), as in
    a `Report`. bytes_read and reads: requested from the source, and for reading back. staging_peak: most bytes that
    were held at once. verified: how the contents were checked. seconds: per phase, in order.
    """

    source: str
    destination: str
    format: str
    to: str
    tensors: int
    nbytes: int
    files: Mapping[str, int] = field(default_factory=dict)
    side_files: Mapping[str, str] = field(default_factory=dict)
    left_behind: Mapping[str, str] = field(default_factory=dict)
    renamed: bool = False
    dropped: Mapping[str, str] = field(default_factory=dict)
    casts: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    bytes_read: int = 0
    reads: int = 0
    staging_peak: int = 0
    warnings: tuple[str, ...] = ()
    verified: str = "not read back"
    seconds: Mapping[str, float] = field(default_factory=dict)
    dry_run: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the account as plain data; the keys are the fields and stay as they are."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(shown(line, _LINE) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        verb = "would write" if self.dry_run else "wrote"
        count = counted(self.tensors, "tensor")
        yield f"{verb} {count}, {human_bytes(self.nbytes)}, to {self.destination} ({self.to})"
        yield f"  of {self.source} ({self.format})"
        yield from _some((f"  {name}: {human_bytes(size)}" for name, size in self.files.items()), "file")
        yield from _reasons("beside", self.side_files)
        yield from _reasons("not taken along", self.left_behind)
        yield from (["  under the names of transformers"] if self.renamed else [])
        yield from (f"  cast {counted(n, 'tensor')} {pair}" for pair, n in self.casts.items())
        yield from _reasons("not cast", self.kept)
        yield from _reasons("dropped", self.dropped)
        yield from (f"  {name}: {over} overflow, {under} underflow" for name, (over, under) in self.losses.items())
        yield from (f"  warning: {warning}" for warning in self.warnings)
        if self.dry_run:
            return
        read, staged = human_bytes(self.bytes_read), human_bytes(self.staging_peak)
        yield f"  read {read} in {counted(self.reads, 'read')}, at most {staged} held; {self.verified}"
        yield "  " + ", ".join(f"{phase} {s:.2f} s" for phase, s in self.seconds.items())


def _some(lines: Iterable[str], what: str) -> Iterator[str]:
    every = list(lines)
    yield from every[:_FILES]
    if len(every) > _FILES:
        yield f"  … and {counted(len(every) - _FILES, f'more {what}')}"


def _reasons(what: str, reasons: Mapping[str, str]) -> Iterator[str]:
    for why, names in by_reason(reasons).items():
        yield f"  {what} ({why}): {few((f.text for f in fold(names)), _NAMES)}"
