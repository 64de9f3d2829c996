"""A GGUF file as the checkpoint of transformers that it was made of: names and values for those who ask by name."""

from __future__ import annotations

from tensorferry.compat.gguf.architectures import ARCHITECTURES
from tensorferry.compat.gguf.configs import infer_config
from tensorferry.compat.gguf.factors import with_factors
from tensorferry.compat.gguf.naming import architecture_of, naming
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.mapped import Mapped, map_catalogue
from tensorferry.formats.gguf_header import read_metadata
from tensorferry.storage.base import Storage

__all__ = ["translated"]


def translated(storage: Storage, catalogue: Catalogue) -> Mapped | None:
    """Return `catalogue` under the names of transformers' checkpoints, with what the converter did to values undone.

    Reads the header once more, for the sizes of the model. None where the files in `storage` are no GGUF of an
    architecture that is known here. Raises ConfigError where sizes are absent, PlanError where tensors do not fit them.
    """
    architecture = architecture_of(catalogue)
    if architecture is None or architecture not in ARCHITECTURES:
        return None
    found = infer_config(read_metadata(storage, storage.stat(catalogue.files[0])), catalogue)
    products = with_factors(catalogue)
    names = naming(architecture, found.config, products)
    return map_catalogue(products, names.rules, names.laid_of)
