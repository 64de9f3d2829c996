"""A configuration made of what a checkpoint says of its model, with where each field comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["InferredConfig", "Origin"]

Origin: TypeAlias = Literal["read", "inferred", "assumed"]
"""read: the file says so. inferred: it follows from tensors or other fields. assumed: what such models usually have."""


@dataclass(frozen=True, slots=True)
class InferredConfig:
    """A configuration as transformers writes it in config.json, made of what a checkpoint says in another form.

    origin: of each field of `config`. What is in neither is what transformers takes by default.
    """

    config: Mapping[str, Any]
    origin: Mapping[str, Origin]

    def of(self, origin: Origin) -> list[str]:
        """Return the fields of one origin, in order."""
        return [name for name, found in self.origin.items() if found == origin]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report should know of fields that the file does not say, one sentence each."""
        told = {
            "inferred from its tensors and other fields": self.of("inferred"),
            "assumed, for the file does not say them": [f"{n} = {self.config[n]!r}" for n in self.of("assumed")],
        }
        return tuple(f"of the configuration, {', '.join(names)}: {how}" for how, names in told.items() if names)
