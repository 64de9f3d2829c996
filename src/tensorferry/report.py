"""What a load did, for people and for programs: one value, as text, JSON or a page. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tensorferry.core.amounts import counted, few, human_bytes
from tensorferry.core.names import fold
from tensorferry.errors import shown

__all__ = ["Report", "by_reason", "plain"]

_NAMES = 4  # folded names on one line
_WARNINGS = 20
_LINE = 1000  # characters


@dataclass(frozen=True, slots=True)
class Report:
    """The account of a load. Names are those of the model for parameters, of the checkpoint for entries.

    source: where the checkpoint is. selection: why these `files`. bytes_needed: what the plan needs; bytes_read: what
    was requested, gaps included; direct_bytes: of these, read straight into parameters; copied_bytes: copied in memory
    after they had come; bytes_compared: read before the plan was made, to see whether tied tensors are equal.
    mapped_bytes: not read, but mapped. ways: how bytes came, to how many: "direct" past the system's page cache,
    "cached" as they were in it, "cached: leased" copied from there, under a lease, "cached: borrowed" as pages of it,
    of which those that are left are copied when the model has been post-processed, "buffered" through it, with the
    reason; "fetched" from an object store; and "from another rank", which read them, so that they are not in
    bytes_read. storage_kind: what reads were chosen for: local, network or remote. staging_peak: most bytes held beside
    the parameters.
    dropped: entry to reason. ties: alias to owner. computed: filled by the model itself. streamed: filled by the
    model's own loader, with the reason. devices: to how many tensors are there in the end, buffers included. casts:
    "F32 -> BF16" to how many tensors. losses: parameter to (overflow, underflow): elements that were finite and not
    zero, and that the narrower type holds as infinity, NaN or its largest value, and as zero. seconds: per phase, in
    order. verified: how contents were checked.
    """

    source: str
    format: str
    files: tuple[str, ...]
    selection: str
    ignored_files: Mapping[str, str]
    parameters: int
    entries: int
    bytes_needed: int
    bytes_read: int
    reads: int
    direct_bytes: int
    staging_peak: int
    executor: str
    fingerprint: str
    unexpected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    computed: tuple[str, ...] = ()
    streamed: Mapping[str, str] = field(default_factory=dict)
    post_processed: tuple[str, ...] = ()
    devices: Mapping[str, int] = field(default_factory=dict)
    casts: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    verified: str = "contents not verified"
    bytes_compared: int = 0
    copied_bytes: int = 0
    mapped_bytes: int = 0
    ways: Mapping[str, int] = field(default_factory=dict)
    storage_kind: str = "local"
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data; the keys are the fields and stay as they are."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self) -> str:
        """Return the report as one page that needs nothing else, to keep or to send; names in it are escaped."""
        from tensorferry.report_page import page  # not at the top: most loads are read on a terminal

        return page(self)

    def __str__(self) -> str:
        return "\n".join(shown(line, _LINE) for line in self._lines())

    def _compared(self) -> list[str]:
        compared = human_bytes(self.bytes_compared)
        return [f"  read {compared} before, to compare tied tensors"] if self.bytes_compared else []

    def _ways(self) -> list[str]:
        mapped = [f"{human_bytes(self.mapped_bytes)} mapped"] if self.mapped_bytes else []
        told = [*mapped, *(f"{human_bytes(n)} {way}" for way, n in self.ways.items())]
        return [f"  came: {', '.join(told)}"] if set(self.ways) - {"buffered"} or mapped else []

    def _lines(self) -> list[str]:
        count, reads = counted(len(self.files), "file"), counted(self.reads, "read")
        read, needed, direct = map(human_bytes, (self.bytes_read, self.bytes_needed, self.direct_bytes))
        lines = [
            f"loaded {counted(self.parameters, 'parameter')} from {self.source} ({self.format}, {count})",
            f"  files: {self.selection}",
            f"  read {read} in {reads} for {needed} needed; {direct} straight into parameters, "
            f"at most {human_bytes(self.staging_peak)} staged",
            *self._ways(),
            *([f"  reads chosen for {self.storage_kind} storage"] if self.storage_kind != "local" else []),
            *self._compared(),
            *(
                f"  on {device}: {counted(n, 'tensor')}"
                for device, n in self.devices.items()
                if set(self.devices) != {"cpu"}
            ),
            *(f"  cast {counted(n, 'tensor')} {pair}" for pair, n in self.casts.items()),
            *_named("tied", [f"{a} = {b}" for a, b in self.ties.items()]),
            *_named("computed by the model", self.computed),
            *(line for why, names in by_reason(self.streamed).items() for line in _named(f"streamed ({why})", names)),
            *(line for why, names in by_reason(self.dropped).items() for line in _named(f"dropped ({why})", names)),
            *_named("unexpected, not used", self.unexpected),
            *_named("missing, allowed", self.missing),
            *_named("values lost in a cast", list(self.losses)),
            *(f"  warning: {w}" for w in self.warnings[:_WARNINGS]),
            *([f"  … and {len(self.warnings) - _WARNINGS} more warnings"] if self.warnings[_WARNINGS:] else []),
            f"  {self.verified}",
        ]
        if self.seconds:
            lines.append("  " + ", ".join(f"{phase} {s:.2f} s" for phase, s in self.seconds.items()))
        return lines


def by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names that `reasons` maps to each reason, in order.

    >>> by_reason({"a": "draft layer", "b": "draft layer"})
    {'draft layer': ['a', 'b']}
    """
    groups: dict[str, list[str]] = {}
    for name, why in reasons.items():
        groups.setdefault(why, []).append(name)
    return groups


def plain(value: Any) -> Any:
    """Return a field of a report as data that JSON has: mappings as dictionaries, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _named(what: str, names: Iterable[str]) -> list[str]:
    folded = [f.text for f in fold(names)]
    return [f"  {what}: {few(folded, _NAMES)}"] if folded else []
