"""Llama 3's scaling of the rotary embedding: its parameters as transformers writes them, and what they come to."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["divisors_of", "llama3_parameters"]

_LOW, _HIGH = 1.0, 4.0  # of all models that were published with this sort of scaling


def llama3_parameters(*, factor: float, original: int) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling from a context of `original` positions."""
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
        "original_max_position_embeddings": original,
    }  # fmt: skip


def divisors_of(parameters: dict[str, Any], theta: float, count: int) -> list[float]:
    """Return by what Llama 3's scaling divides each of `count` rotary frequencies.

    Long waves by the factor, short ones by 1, and those between by what lies smoothly between; as Meta published it.
    """
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    divisors = []
    for j in range(count):
        wave = 2 * math.pi * theta ** (j / count)
        smooth = min(1.0, max(0.0, (original / wave - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
