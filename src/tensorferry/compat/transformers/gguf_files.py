"""The configuration of a GGUF file as an object of transformers, and how one that was given agrees with the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorferry.compat.gguf.configs import SMALL_TENSORS, infer_config
from tensorferry.compat.translation import InferredConfig
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import Kind
from tensorferry.errors import ConfigError, PlanError, shown
from tensorferry.execute.simple import read_entry
from tensorferry.formats.gguf_header import read_metadata
from tensorferry.storage.base import Storage

__all__ = ["config_from_file", "differences", "inferred", "is_gguf"]

_MOST_FREQUENCIES = 4096


def is_gguf(catalogue: Catalogue) -> bool:
    """Whether the checkpoint is a GGUF file, or several."""
    return catalogue.format == "gguf"


def inferred(storage: Storage, catalogue: Catalogue) -> InferredConfig:
    """Return the configuration that the GGUF file behind `catalogue`, in `storage`, has. Reads its header again.

    Raises PlanError for a file without tensors, ConfigError for an architecture that is not known, FormatError.
    """
    first = catalogue.files[0]
    if not catalogue:
        raise PlanError(f"{storage.uri}/{first}: no tensors (vocabulary only?)")
    metadata = read_metadata(storage, storage.stat(first))
    small = [catalogue[name] for name in SMALL_TENSORS if name in catalogue]
    values = {entry.name: _values(storage, entry) for entry in small}
    return infer_config(metadata, catalogue, values)


def _values(storage: Storage, entry: TensorEntry) -> Sequence[float]:
    if len(entry.shape) != 1 or entry.shape[0] > _MOST_FREQUENCIES or entry.dtype.kind is not Kind.FLOAT:
        what = f"{entry.dtype} {list(entry.shape)}"
        raise ConfigError(f"{entry.name}: a vector of at most {_MOST_FREQUENCIES} numbers is expected, found {what}")
    values: Sequence[float] = read_entry(storage, entry).float().tolist()
    return values


def config_from_file(found: InferredConfig) -> Any:
    """Return the configuration as transformers' own object. Raises ConfigError where this release has none such."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = found.config["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"the installed transformers has no model_type {kind!r}: take a newer one")
    fields = {name: value for name, value in found.config.items() if name != "model_type"}
    try:
        return CONFIG_MAPPING[kind](**fields)
    except Exception as error:  # its many configurations validate with errors of their own
        said = shown(str(error), 500)
        raise ConfigError(f"transformers does not take the file's {kind} configuration: {said}") from error


def differences(config: Any, found: InferredConfig) -> tuple[str, ...]:
    """Return in what a given configuration is not that of the file, one sentence each; what it says is used."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    given = text.to_dict()
    return tuple(
        f"the configuration says {name} = {ours!r}, the file {theirs!r}: the configuration's is used"
        for name, ours, theirs in _compared(given, found)
        if not _agree(ours, theirs)
    )


def _compared(given: Mapping[str, Any], found: InferredConfig) -> Iterator[tuple[str, Any, Any]]:
    for name, theirs in found.config.items():
        if name == "rope_parameters" and found.origin[name] != "assumed" and "rope_theta" in theirs:
            ours = given.get(name) or {}
            keys = [key for key in ("rope_theta", "rope_type", "factor") if key in ours and key in theirs]
            yield from ((key, ours[key], theirs[key]) for key in keys)
        elif found.origin[name] != "assumed" and isinstance(theirs, int | float) and given.get(name) is not None:
            yield name, given[name], theirs


def _agree(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float | int) and isinstance(theirs, float | int):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)
