"""What a load did, for people and for programs: one value, as text or JSON. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tensorferry.core.explain import human_bytes
from tensorferry.core.names import fold

__all__ = ["Report"]


@dataclass(frozen=True, slots=True)
class Report:
    """The account of a load. Names are those of the model for parameters, of the checkpoint for entries.

    source: where the checkpoint is. selection: why these `files`. bytes_needed: what the plan needs; bytes_read: what
    was requested, gaps included; direct_bytes: of these, read straight into parameters. staging_peak: most bytes
    held beside the parameters. dropped: entry to reason. ties: alias to owner. computed: filled by the model itself.
    streamed: filled by the model's own loader, with the reason. casts: "F32 -> BF16" to how many tensors. losses:
    parameter to (overflow, underflow) elements. seconds: per phase, in order. verified: how contents were checked.
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
    casts: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    verified: str = "contents not verified"
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data; the keys are the fields and stay as they are."""
        return asdict(self)

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        count = f"{len(self.files)} file" + ("s" if len(self.files) != 1 else "")
        read, needed, direct = map(human_bytes, (self.bytes_read, self.bytes_needed, self.direct_bytes))
        lines = [
            f"loaded {self.parameters:,} parameters from {self.source} ({self.format}, {count})",
            f"  files: {self.selection}",
            f"  read {read} in {self.reads:,} reads for {needed} needed; {direct} straight into parameters, "
            f"at most {human_bytes(self.staging_peak)} staged",
            *(f"  cast {count} tensors {pair}" for pair, count in self.casts.items()),
            *_named("tied", [f"{a} = {b}" for a, b in self.ties.items()]),
            *_named("computed by the model", self.computed),
            *_named("streamed through the model's own loader", self.streamed),
            *(line for why, names in self._by_reason().items() for line in _named(f"dropped ({why})", names)),
            *_named("unexpected, not used", self.unexpected),
            *_named("missing, allowed", self.missing),
            *(f"  {name}: {o:,} overflow, {u:,} underflow" for name, (o, u) in self.losses.items()),
            *(f"  warning: {w}" for w in self.warnings),
            f"  {self.verified}",
        ]
        if self.seconds:
            lines.append("  " + ", ".join(f"{phase} {s:.2f} s" for phase, s in self.seconds.items()))
        return lines

    def _by_reason(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for name, why in self.dropped.items():
            groups.setdefault(why, []).append(name)
        return groups


def _named(what: str, names: Mapping[str, str] | tuple[str, ...] | list[str]) -> list[str]:
    if not names:
        return []
    folded = [f.text for f in fold(names)]
    more = f" and {len(folded) - 4} more" if len(folded) > 4 else ""
    return [f"  {what}: {', '.join(folded[:4])}{more}"]
