"""Which names the tensors of a conversion get, and what the source says of its model beside config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorferry.checkpoint import Checkpoint
from tensorferry.compat.foreign import foreign_naming, is_foreign
from tensorferry.compat.gguf.factors import with_factors
from tensorferry.compat.transformers.own_configs import brings_config, own_config
from tensorferry.compat.translation import Naming
from tensorferry.conversion.wanted import Names
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.mapped import map_catalogue
from tensorferry.errors import ConfigError, shown
from tensorferry.storage.base import Storage

__all__ = ["Named", "named"]


@dataclass(frozen=True, slots=True)
class Named:
    """The tensors of a source under the names that they are written with.

    dropped: entries of the source that nothing is made of, to why. unknown: entries that no rule names, which keep
    theirs. renamed: whether names are other ones. config: what config.json should say where the source has none.
    """

    catalogue: Catalogue
    dropped: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    renamed: bool = False
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def named(checkpoint: Checkpoint, names: Names, config: Mapping[str, Any] | None) -> Named:
    """Return what `checkpoint` holds under the names that are wanted.

    config: what its config.json says, if it has one. Raises ConfigError where names are not known, or nothing says the
    sizes that they depend on.
    """
    catalogue = checkpoint.catalogue
    if names == "keep" or not is_foreign(catalogue):
        if names == "hf" and not is_foreign(catalogue):
            return Named(catalogue, notes=("its names are taken for those of transformers",))
        return Named(catalogue)
    try:
        own, notes = _config(checkpoint.storage, catalogue, config)
        products = with_factors(catalogue)
        naming = _naming(products, own if config is None else config)
    except ConfigError as error:
        raise ConfigError(f"{shown(checkpoint.uri, 300)}: {error}; or keep its names with names='keep'") from error
    return _mapped(products, naming, own, notes)


def _config(
    storage: Storage, catalogue: Catalogue, given: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    if given is not None:
        return None, ()
    if not brings_config(storage, catalogue):
        raise ConfigError("its names are not those of transformers, and nothing beside it says the sizes of the model")
    found = own_config(storage, catalogue)
    return found.found.config, found.notes


def _naming(catalogue: Catalogue, config: Mapping[str, Any] | None) -> Naming:
    assert config is not None
    inner = config.get("text_config")
    sizes = inner if isinstance(inner, dict) else config
    found = foreign_naming(catalogue, sizes)
    assert found is not None
    return found


def _mapped(catalogue: Catalogue, naming: Naming, config: Mapping[str, Any] | None, notes: tuple[str, ...]) -> Named:
    mapped = map_catalogue(catalogue, naming.rules, naming.laid_of)
    unknown = tuple(name for name in catalogue if naming.rules.route(name) is None)
    return Named(mapped.catalogue, mapped.dropped, unknown, renamed=True, config=config, notes=notes)
