"""Giving a model's own loader the names that it was written for. What the names of a format mean is not known here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module

from tensorferry.checkpoint import Checkpoint
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.mapped import Mapped
from tensorferry.storage.base import Storage

__all__ = ["TRANSLATORS", "Translator", "translate"]

Translator = Callable[[Storage, Catalogue], Mapped | None]
"""Returns the catalogue of the files in a storage under the names of transformers; None for files that are not its."""

TRANSLATORS: Sequence[tuple[Callable[[Catalogue], bool], str]] = (
    (lambda catalogue: catalogue.format == "gguf", "tensorferry.compat.gguf.translating:translated"),
    (
        lambda catalogue: any(name.endswith(".attention.wq.weight") for name in catalogue),
        "tensorferry.compat.consolidated.translating:translated",
    ),
)
"""What every catalogue of a translator has, and where that is, as module and name.

They stand beside the loaders, and are imported when they are needed: that takes longer than opening a checkpoint.
"""


def translate(checkpoint: Checkpoint) -> tuple[Checkpoint, Mapping[str, str]]:
    """Return the checkpoint under the names of transformers, and why entries of it are left out.

    The same one where its names are no others, or where they are not known.
    """
    for may_be, place in TRANSLATORS:
        if not may_be(checkpoint.catalogue):
            continue
        module, _, name = place.partition(":")
        translator: Translator = getattr(import_module(module), name)
        mapped = translator(checkpoint.storage, checkpoint.catalogue)
        if mapped is not None:
            return replace(checkpoint, catalogue=mapped.catalogue), mapped.dropped
    return checkpoint, {}
