"""Options, as frozen values that refuse nonsense when they are made. No free dictionaries, no globals."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

from tensorferry.errors import ConfigError

__all__ = ["ReadOptions"]

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How bytes are read. Sizes are in bytes.

    max_staging: most that is staged at once, whatever the size of the checkpoint. max_read: largest single
    read. max_gap: largest hole between two needed ranges that is read over rather than skipped. waste: most bytes
    read for each byte needed. threads: reader threads; 0 for as many as the machine's cores, at most 8.
    """

    max_staging: int = 256 * MIB
    max_read: int = 16 * MIB
    max_gap: int = 256 * KIB
    waste: float = 32.0
    threads: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = (int, float) if field.name == "waste" else (int,)
            if isinstance(value, bool) or not isinstance(value, allowed):
                raise ConfigError(f"{field.name} must be a number, not {value!r}")
        if self.max_read < 4096 or self.max_staging < self.max_read:
            raise ConfigError(
                f"max_read ({self.max_read:,}) must be at least 4,096 and at most max_staging ({self.max_staging:,})"
            )
        if self.max_gap < 0 or self.waste < 1 or self.threads < 0:
            raise ConfigError("max_gap and threads must not be negative, and waste must be at least 1")

    @property
    def workers(self) -> int:
        """How many reader threads there will be."""
        return self.threads or min(8, max(2, os.cpu_count() or 1))
