"""Which file decodes which block type: the same in torch, compiled for CPUs (`compiled`) and for GPUs (`device`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["FAMILY"]

FAMILY: Mapping[str, str] = MappingProxyType(
    {
        name: family
        for family, names in {
            "flat": ("Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
            "nested": ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
            "codebooks": ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
            "levels": ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"),
            "ternary": ("TQ1_0", "TQ2_0"),
        }.items()
        for name in names
    }
)
"""The file of each type that can be decoded; the function in it has the name of the type in lower case."""
