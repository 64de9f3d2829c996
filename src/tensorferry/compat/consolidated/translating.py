"""Meta's and Mistral's files as the checkpoint of transformers that they equal, for those who ask by name."""

from __future__ import annotations

from tensorferry.compat.consolidated.configs import infer_config
from tensorferry.compat.consolidated.naming import has_native_names, naming
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.mapped import Mapped, map_catalogue
from tensorferry.formats.params_json import read_params
from tensorferry.storage.base import Storage

__all__ = ["translated"]


def translated(storage: Storage, catalogue: Catalogue) -> Mapped | None:
    """Return `catalogue` under the names of transformers' checkpoints, rows of queries and keys in their order.

    Reads params.json, for the sizes of the model. None for other names, and where there is no such file. Raises
    ConfigError for a model that is not known here, PlanError where tensors do not fit its sizes.
    """
    params = read_params(storage) if has_native_names(catalogue) else None
    if params is None:
        return None
    return map_catalogue(catalogue, naming(infer_config(params, catalogue).config, catalogue).rules)
