"""Tables that decoders look codes up in: codebooks, levels, signs, scales of 8 bits. Made once for each device."""

from __future__ import annotations

from functools import cache

import torch

from tensorferry.numerics.gguf.grids import GRIDS

__all__ = ["FP4", "NONLINEAR", "even_signs", "grid", "half_e8m0", "half_ue4m3", "pairs", "signs"]

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The levels of IQ4_NL and IQ4_XS; ``kvalues_iq4nl`` in ggml."""

FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the E2M1 numbers, with both zeros positive as in ggml; the scales that belong to them are halved."""


@cache
def grid(name: str, device: torch.device) -> torch.Tensor:
    """Return the codebook of a type as float32 (vectors, elements of a vector)."""
    return _floats(list(GRIDS[name].vectors()), device)


@cache
def pairs(levels: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return float32 (256, 2): for each byte, the levels that its low and its high half stand for."""
    return _floats([(levels[byte & 15], levels[byte >> 4]) for byte in range(256)], device)


@cache
def signs(device: torch.device) -> torch.Tensor:
    """Return float32 (256, 8): for each byte, -1 where its bit is set and 1 elsewhere, lowest bit first."""
    return _floats([[1 - 2 * (byte >> bit & 1) for bit in range(8)] for byte in range(256)], device)


@cache
def even_signs(device: torch.device) -> torch.Tensor:
    """Return float32 (128, 8): signs of which 7 bits are stored, and the eighth makes the number of -1 even."""
    return signs(device)[[code | (code.bit_count() & 1) << 7 for code in range(128)]]


@cache
def half_e8m0(device: torch.device) -> torch.Tensor:
    """Return float32 (256, 1): half of each E8M0 scale, 2 ** (byte - 128); 255 is no special case in ggml."""
    bits = [1 << 21 + byte if byte < 2 else (byte - 1) << 23 for byte in range(256)]
    return torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32).unsqueeze(1)


@cache
def half_ue4m3(device: torch.device) -> torch.Tensor:
    """Return float32 (256, 1): half of each E4M3 scale, whose sign is ignored; in ggml 127 is zero, 255 is not."""
    scales = [_e4m3(byte >> 3 & 15, byte & 7) / 2 if byte != 127 else 0.0 for byte in range(256)]
    return _floats(scales, device).unsqueeze(1)


def _e4m3(exponent: int, mantissa: int) -> float:
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9


def _floats(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
