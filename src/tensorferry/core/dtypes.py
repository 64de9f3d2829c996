"""The data types an element can have in a file or in a parameter, as plain values.

Names are those of the safetensors format, which every other format maps to. What torch calls them is
the business of `numerics`. A type is described by its *block*: the smallest group of elements that
starts on a byte boundary (one element for ordinary types, two for F4, thirty-two for GGUF's Q4_1). Types of
the kind PACKED hold codes and their scales in each block; a `Dequantize` transform makes numbers of them. Of types of
the kind UNKNOWN a file gives no more than a name or a number: not even their size is known, and nothing reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from types import MappingProxyType
from typing import Any

__all__ = ["DTYPES", "Cast", "DType", "Kind", "cast_kind", "dtype_from_json", "dtype_to_json"]


class Kind(Enum):
    """What sort of number a type holds; casts between different sorts are never silent."""

    BOOL = "bool"
    UNSIGNED = "unsigned"
    SIGNED = "signed"
    FLOAT = "float"
    COMPLEX = "complex"
    PACKED = "packed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. `exponent` and `mantissa` are bits, of one component for complex types."""

    name: str
    kind: Kind
    block_bytes: int
    block: int = 1
    exponent: int = 0
    mantissa: int = 0

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)  # types are keys of every cache; hashing an Enum alone takes longer

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes that a contiguous tensor of `shape` takes.

        >>> DTYPES["BF16"].nbytes((2, 3)), DTYPES["F4"].nbytes((2, 4))
        (12, 4)
        """
        return prod(shape) * self.block_bytes // self.block

    @property
    def bits(self) -> int:
        """Bits of one element, for types whose elements all take the same."""
        return self.block_bytes * 8 // self.block

    @property
    def magnitude(self) -> int:
        """For integers and booleans: bits that hold the magnitude."""
        return {Kind.BOOL: 1, Kind.UNSIGNED: self.bits, Kind.SIGNED: self.bits - 1}.get(self.kind, 0)


def _float(name: str, size: int, exponent: int, mantissa: int, block: int = 1) -> DType:
    return DType(name, Kind.FLOAT, size, block, exponent, mantissa)


_ALL = (
    DType("BOOL", Kind.BOOL, 1),
    DType("U8", Kind.UNSIGNED, 1),
    DType("U16", Kind.UNSIGNED, 2),
    DType("U32", Kind.UNSIGNED, 4),
    DType("U64", Kind.UNSIGNED, 8),
    DType("I8", Kind.SIGNED, 1),
    DType("I16", Kind.SIGNED, 2),
    DType("I32", Kind.SIGNED, 4),
    DType("I64", Kind.SIGNED, 8),
    _float("F4", 1, 2, 1, block=2),
    _float("F6_E2M3", 3, 2, 3, block=4),
    _float("F6_E3M2", 3, 3, 2, block=4),
    _float("F8_E4M3", 1, 4, 3),
    _float("F8_E4M3FNUZ", 1, 4, 3),
    _float("F8_E5M2", 1, 5, 2),
    _float("F8_E5M2FNUZ", 1, 5, 2),
    _float("F8_E8M0", 1, 8, 0),
    _float("F16", 2, 5, 10),
    _float("BF16", 2, 8, 7),
    _float("F32", 4, 8, 23),
    _float("F64", 8, 11, 52),
    DType("C32", Kind.COMPLEX, 4, 1, 5, 10),
    DType("C64", Kind.COMPLEX, 8, 1, 8, 23),
    DType("C128", Kind.COMPLEX, 16, 1, 11, 52),
    *(
        DType(name, Kind.PACKED, size, block)
        for block, types in {
            32: {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q8_1": 36, "IQ4_NL": 18, "MXFP4": 17},
            64: {"NVFP4": 36, "Q2_0": 18},
            128: {"Q1_0": 18},
            256: {
                "Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q8_K": 292,
                "IQ1_S": 50, "IQ1_M": 56, "IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82,
                "IQ3_XXS": 98, "IQ3_S": 110, "IQ4_XS": 136, "TQ1_0": 54, "TQ2_0": 66,
            },
        }.items()
        for name, size in types.items()
    ),
)  # fmt: skip

DTYPES: Mapping[str, DType] = MappingProxyType({d.name: d for d in _ALL})
"""Every element type by name: safetensors' names, C32 and C128 that only torch files carry, GGUF's block types."""


def dtype_to_json(dtype: DType) -> str | list[str | int]:
    """Return the name of a plain type, and all that is known of one that only some format has."""
    if DTYPES.get(dtype.name) == dtype:
        return dtype.name
    return [dtype.name, dtype.kind.value, dtype.block_bytes, dtype.block, dtype.exponent, dtype.mantissa]


def dtype_from_json(data: Any) -> DType:
    """Return the type that `dtype_to_json` described; raises LookupError, TypeError or ValueError for anything else."""
    if isinstance(data, str):
        return DTYPES[data]
    name, kind, *numbers = data
    return DType(name, Kind(kind), *numbers)


class Cast(Enum):
    """What a change of type does to values."""

    SAME = "same"
    EXACT = "exact"
    ROUNDS = "rounds"
    NARROWS = "narrows"
    CHANGES_KIND = "changes kind"


def cast_kind(source: DType, target: DType) -> Cast:
    """Return what casting `source` to `target` can do to a value, judged from the types alone.

    ROUNDS loses mantissa bits (F32 to BF16); NARROWS can also overflow to infinity or underflow to
    zero (BF16 to F16); CHANGES_KIND turns one sort of number into another (integers into floats,
    packed codes into anything) and is hardly ever what a checkpoint means.

    >>> cast_kind(DTYPES["F16"], DTYPES["F32"]).value, cast_kind(DTYPES["BF16"], DTYPES["F16"]).value
    ('exact', 'narrows')
    """
    if source == target:
        return Cast.SAME
    if source.kind is target.kind and source.kind in (Kind.FLOAT, Kind.COMPLEX):
        return _between_floats(source, target)
    integers = (Kind.UNSIGNED, Kind.SIGNED)
    if source.kind in integers and target.kind in integers:
        fits = target.magnitude >= source.magnitude and not (
            source.kind is Kind.SIGNED and target.kind is Kind.UNSIGNED
        )
        return Cast.EXACT if fits else Cast.NARROWS
    return Cast.CHANGES_KIND


def _between_floats(source: DType, target: DType) -> Cast:
    if target.exponent < source.exponent:
        return Cast.NARROWS
    if "FNUZ" in source.name + target.name or "E8M0" in source.name + target.name:
        same_width = target.exponent == source.exponent
        return Cast.NARROWS if same_width else Cast.EXACT
    return Cast.ROUNDS if target.mantissa < source.mantissa else Cast.EXACT
