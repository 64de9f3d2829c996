"""Which checkpoints have the names of another layout than transformers', and how these are called there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorferry.compat.consolidated.naming import has_native_names
from tensorferry.compat.consolidated.naming import naming as consolidated_naming
from tensorferry.compat.gguf.naming import architecture_of
from tensorferry.compat.gguf.naming import naming as gguf_naming
from tensorferry.compat.translation import Naming
from tensorferry.core.catalogue import Catalogue

__all__ = ["foreign_naming", "is_foreign"]


def is_foreign(catalogue: Catalogue) -> bool:
    """Whether tensors have the names of a GGUF file, or those of Meta and Mistral."""
    return architecture_of(catalogue) is not None or has_native_names(catalogue)


def foreign_naming(catalogue: Catalogue, config: Mapping[str, Any]) -> Naming | None:
    """Return how a model of the sizes in `config` calls the entries; None where those are their names.

    config: of the part that handles text, as transformers writes it. Raises ConfigError for an architecture that is not
    known here, and where a size is absent.
    """
    architecture = architecture_of(catalogue)
    if architecture is not None:
        return gguf_naming(architecture, config, catalogue)
    return consolidated_naming(config, catalogue) if has_native_names(catalogue) else None
