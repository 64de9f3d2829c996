"""Parameters as views of mapped files: nothing is read before it is used, and processes share the pages."""

from __future__ import annotations

from collections.abc import Container

import torch

from tensorferry.core.plan import Plan
from tensorferry.errors import ConfigError
from tensorferry.execute.blame import too_short
from tensorferry.execute.lying import whole_runs
from tensorferry.numerics.memory import tensor_over
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape
from tensorferry.storage.base import Storage, SupportsMap

__all__ = ["mapped_parameters"]


def mapped_parameters(plan: Plan, storage: Storage, wanted: Container[str]) -> dict[str, torch.Tensor]:
    """Return those of the `wanted` parameters that lie in a file just as they will lie in memory, as views of it.

    They are written to page by page in copies of this process; the files stay as they are. Each has a storage of its
    own, of just its bytes, which cannot be resized. Left out is what is cast, transformed, put together, or lies on an
    address that is odd for its type.

    Raises ConfigError where `storage` cannot map, ReadError where a file is too short.
    """
    if not isinstance(storage, SupportsMap):
        raise ConfigError(f"mapped: files of {storage.uri} cannot be mapped: read them")
    found: dict[str, torch.Tensor] = {}
    for name, run in whole_runs(plan).items():
        spec = plan.parameters[name]
        dtype = torch_dtype(spec.dtype)
        if name in wanted and run.start % dtype.itemsize == 0:
            file = storage.map(run.file, writable=True)
            if run.start + run.length > len(file):
                raise too_short(run.file, name)
            found[name] = tensor_over(file, run.start, torch_shape(spec.dtype, spec.shape), dtype)
    return found
