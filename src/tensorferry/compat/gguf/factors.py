"""Factors that GGUF files carry beside packed weights: ``NAME.scale`` is multiplied in.

llama.cpp's converter writes them for NVFP4, whose blocks have factors of too few bits for the range of a whole tensor:
one number for a matrix, one for each expert of a stack, none where it is 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tensorferry.core.catalogue import Catalogue, Made, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.making import Scale
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import RuleError, shown

__all__ = ["with_factors"]

_FACTOR, _WEIGHT = ".scale", ".weight"


def with_factors(catalogue: Catalogue) -> Catalogue:
    """Return `catalogue` with each weight that has a factor beside it as the product, float32, and not the factor.

    The same object where there are none, as in any file that is not GGUF. Raises RuleError for a factor that does not
    fit its weight.
    """
    if catalogue.format != "gguf":
        return catalogue
    factors = {e.name.removesuffix(_FACTOR) + _WEIGHT: e for e in catalogue.values() if e.name.endswith(_FACTOR)}
    found = {name: e for name, e in factors.items() if name in catalogue}
    if not found:
        return catalogue
    used = {e.name for e in found.values()}
    return catalogue.replacing(_products((e for e in catalogue.values() if e.name not in used), found))


def _products(entries: Iterable[TensorEntry], factors: dict[str, TensorEntry]) -> Iterator[TensorEntry]:
    for entry in entries:
        factor = factors.get(entry.name)
        yield entry if factor is None else _product(entry, factor)


def _product(entry: TensorEntry, factor: TensorEntry) -> TensorEntry:
    try:
        Scale().infer([TensorSpec(e.dtype, e.shape) for e in (entry, factor)])
    except ValueError as error:
        raise RuleError(f"{shown(factor.name)} is no factor of {shown(entry.name)}: {error}") from None
    return replace(entry, dtype=DTYPES["F32"], chunks=(), digest=None, made=Made((entry, factor), Scale()))
