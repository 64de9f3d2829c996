"""What a checkpoint says of its model in another form than config.json: the metadata of a GGUF file, or params.json."""

from __future__ import annotations

from typing import NamedTuple

from tensorferry.compat.consolidated.configs import infer_config
from tensorferry.compat.consolidated.naming import has_native_names
from tensorferry.compat.consolidated.refusals import unread
from tensorferry.compat.transformers import gguf_files
from tensorferry.compat.translation import InferredConfig
from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import shown
from tensorferry.formats.params_json import PARAMS_FILE, read_params
from tensorferry.storage.base import Storage
from tensorferry.storage.reading import is_there

__all__ = ["OwnConfig", "brings_config", "own_config"]


class OwnConfig(NamedTuple):
    """A configuration made of what a checkpoint says. where: the file. notes: one sentence each."""

    found: InferredConfig
    where: str
    notes: tuple[str, ...]


def brings_config(storage: Storage, catalogue: Catalogue) -> bool:
    """Whether the checkpoint behind `catalogue`, in `storage`, says of its model what config.json would."""
    return gguf_files.is_gguf(catalogue) or (has_native_names(catalogue) and is_there(storage, PARAMS_FILE))


def own_config(storage: Storage, catalogue: Catalogue) -> OwnConfig:
    """Return what a checkpoint that `brings_config` says.

    Raises ConfigError for a model that is not known here, PlanError for a file without tensors, FormatError.
    """
    if gguf_files.is_gguf(catalogue):
        found = gguf_files.inferred(storage, catalogue)
        return OwnConfig(found, f"{storage.uri}/{catalogue.files[0]}", found.notes)
    params = read_params(storage)
    assert params is not None
    found = infer_config(params, catalogue)
    unknown = unread(params)
    told = (f"{PARAMS_FILE} says {', '.join(map(shown, unknown))}, which is not known here and not used",)
    return OwnConfig(found, f"{storage.uri}/{PARAMS_FILE}", (*found.notes, *(told if unknown else ())))
