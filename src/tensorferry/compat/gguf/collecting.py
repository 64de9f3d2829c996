"""Collects the fields of a configuration out of a GGUF file, each with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tensorferry.compat.translation import InferredConfig, Origin
from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import ConfigError, shown
from tensorferry.formats.gguf_metadata import GgufMetadata

__all__ = ["REQUIRED", "Collector", "Field"]

REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class Field:
    """A field and the key it is read from, below the name of the architecture; `otherwise` is assumed without it."""

    name: str
    key: str
    kind: Literal["integer", "number", "flag"] = "integer"
    otherwise: Any = REQUIRED


@dataclass
class Collector:
    """The fields found so far. metadata, catalogue: of the file. values: of small tensors, by name, as far as read."""

    metadata: GgufMetadata
    catalogue: Catalogue
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Origin] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return self.metadata.text("general.architecture") or ""

    def set(self, origin: Origin, **fields: Any) -> None:
        """Take fields, in place of what was there."""
        self.config.update(fields)
        self.origin.update(dict.fromkeys(fields, origin))

    def take(self, one: Field) -> None:
        """Take a field from its key.

        Raises ConfigError where a required one is absent, CorruptFile where it is of a wrong type.
        """
        value = self.get(one.key, one.kind)
        if value is not None:
            self.set("read", **{one.name: value})
        elif one.otherwise is REQUIRED:
            raise ConfigError(
                f"{self.metadata!r} do not have {shown(self.architecture)}.{one.key}, without which there is no "
                f"{one.name}: give a configuration"
            )
        else:
            self.set("assumed", **{one.name: one.otherwise})

    def get(self, key: str, kind: str = "integer") -> Any:
        """Return the value of a key below the architecture's name; None where it is absent."""
        full = f"{self.architecture}.{key}"
        if full not in self.metadata:
            return None
        if kind == "number":
            return self.metadata.number(full)
        if kind == "flag":
            return self.metadata.flag(full)
        if self.metadata.typed(full).element is not None:
            return self._same_everywhere(full)
        return self.metadata.integer(full)

    def _same_everywhere(self, key: str) -> int | None:
        each = list(self.metadata.integers(key) or ())
        if len(set(each)) > 1:
            raise ConfigError(f"{key} differs from layer to layer, which is not known here: give a configuration")
        return each[0] if each else None

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.catalogue

    def extent(self, name: str, dim: int) -> int | None:
        """Return an extent of a tensor; None where it is absent."""
        entry = self.catalogue.get(name)
        return entry.shape[dim] if entry is not None and len(entry.shape) > dim else None

    def finish(self) -> InferredConfig:
        """Return what was found."""
        return InferredConfig(MappingProxyType(self.config), MappingProxyType(self.origin))
