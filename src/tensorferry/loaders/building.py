"""Building the model that a config.json describes, where the caller does not build one himself."""

from __future__ import annotations

import logging
import os
from importlib import import_module

from torch import nn

from tensorferry.config import ModelConfig
from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import ConfigError, shown

__all__ = ["NO_WEIGHTS", "from_config"]

logger = logging.getLogger(__name__)

_BUILDER = "tensorferry.compat.transformers"
"""A module with ``build_model``. It stands beside the loaders, so neither may import the other when it is imported."""

NO_WEIGHTS = Catalogue((), format="none")


def from_config(
    path: str | os.PathLike[str], model_config: ModelConfig, catalogue: Catalogue = NO_WEIGHTS
) -> nn.Module:
    """Return the model of a folder or an address, empty and on meta, by the transformers class that config.json names.

    catalogue: of its weights, where they are known. Raises ConfigError, UnsafeFile, LocateError.
    """
    if model_config.quantization is not None:
        raise ConfigError(
            f"quantization {model_config.quantization!r}: models are built unquantized here; pass build= to "
            "quantize, or leave it out"
        )
    model: nn.Module
    model, notes = import_module(_BUILDER).build_model(
        path,
        catalogue,
        subfolder=model_config.subfolder,
        dtype=model_config.dtype,
        trust_remote_code=model_config.trust_remote_code,
    )
    for note in notes:
        logger.warning("%s: %s", shown(os.fspath(path), 300), shown(note, 1000))
    return model
