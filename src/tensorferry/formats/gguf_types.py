"""The element types of GGUF tensors by their numbers. What is in a block is the business of `numerics`.

The numbers are those of ggml's ``enum ggml_type`` (https://github.com/ggml-org/ggml, include/ggml.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tensorferry.core.dtypes import DTYPES, DType, Kind

__all__ = ["GGML_TYPES", "REMOVED_TYPES", "ggml_type"]

GGML_TYPES: Mapping[int, DType] = MappingProxyType(
    {
        number: DTYPES[name]
        for number, name in {
            0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
            10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
            16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
            23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
            34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
        }.items()
    }
)  # fmt: skip
"""Every type of which the size of a block is known, by its number."""

REMOVED_TYPES = frozenset((4, 5, 31, 32, 33, 36, 37, 38))
"""Numbers that ggml once used (Q4_2, Q4_3 and repacked forms of Q4_0 and IQ4_NL) and has taken back."""

_SWAPPABLE = ("F32", "F16", "BF16")


def ggml_type(number: int, *, swapped: bool = False) -> DType:
    """Return the type with that number; of the kind UNKNOWN, without a size, where it cannot be read here.

    swapped: the file has the other byte order than ggml's types. Floats of up to 32 bits then come as packed blocks of
    one element, which are put in order where numbers are made of them; types of one byte stay what they are.

    >>> ggml_type(12).name, ggml_type(200).name, ggml_type(1, swapped=True).name
    ('Q4_K', 'ggml type 200', 'F16 big-endian')
    """
    known = GGML_TYPES.get(number)
    if known is None:
        return _unknown(f"ggml type {number}{' (removed from ggml)' if number in REMOVED_TYPES else ''}")
    if not swapped or known.block_bytes == 1:
        return known
    name = f"{known.name} big-endian"
    return DType(name, Kind.PACKED, known.block_bytes) if known.name in _SWAPPABLE else _unknown(name)


def _unknown(name: str) -> DType:
    return DType(name, Kind.UNKNOWN, 0)
