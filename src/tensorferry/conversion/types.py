"""Which type each tensor of a conversion gets: floating numbers the one that is asked for, everything else its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES, DType, Kind

__all__ = ["NUMBERS", "settled_types"]

NUMBERS = frozenset(DTYPES[name] for name in ("F16", "BF16", "F32", "F64"))
"""Types whose values are meant as they are, so that a cast to another one of them only rounds."""

_SCALE = re.compile(r"scale|zero|absmax|quant|_zp$|amax")
_KINDS = {
    Kind.BOOL: "true or false", Kind.UNSIGNED: "integers", Kind.SIGNED: "integers", Kind.COMPLEX: "complex numbers",
    Kind.FLOAT: "numbers of 8 bits or fewer, which mean little without their scales",
}  # fmt: skip


def settled_types(catalogue: Catalogue, wanted: DType | None) -> tuple[Mapping[str, DType], Mapping[str, str]]:
    """Return the type of each tensor to write, and why tensors do not get the one that is `wanted`.

    Packed blocks become numbers: of the type that is wanted, else float32, which holds them exactly.
    """
    types, kept = {}, {}
    quantized = {name for name, entry in catalogue.items() if _is_quantized(entry)}
    modules = {name.rpartition(".")[0] for name in quantized}
    for name, entry in catalogue.items():
        types[name] = DTYPES["F32"] if entry.dtype.kind is Kind.PACKED else entry.dtype
        if wanted is None or types[name] == wanted:
            continue
        why = _kept(name, types[name], quantized, modules)
        if why:
            kept[name] = why
        else:
            types[name] = wanted
    return types, kept


def _is_quantized(entry: TensorEntry) -> bool:
    if entry.dtype.kind is Kind.FLOAT:
        return entry.dtype not in NUMBERS
    return entry.dtype.kind in (Kind.UNSIGNED, Kind.SIGNED)


def _kept(name: str, dtype: DType, quantized: Collection[str], modules: Collection[str]) -> str:
    """Return why a tensor keeps its type, "" where it does not."""
    if dtype not in NUMBERS:
        return _KINDS.get(dtype.kind, "of a type that is not known")
    module, _, leaf = name.rpartition(".")
    beside = module in modules or module in quantized
    return "scales of quantized weights" if beside and _SCALE.search(leaf) else ""
