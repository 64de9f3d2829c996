"""Types whose indices stand for vectors of a codebook: IQ1, IQ2 and IQ3. Layouts: ggml, ``ggml-common.h``.

Every decoder takes uint8 blocks (n, bytes) of 256 elements and returns float32 (n, ...) with the elements of a block
in order. What comes in groups of 32 is handled as (n, 8 groups, ...).
"""

from __future__ import annotations

import torch

from tensorferry.numerics.gguf.fields import half, run, words
from tensorferry.numerics.gguf.tables import even_signs, grid, signs

__all__ = ["iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs"]


def iq2_xxs(b: torch.Tensor) -> torch.Tensor:
    """A group is 4 indices of 8 bits, and a word of 4 times 7 signs under a scale of 4 bits."""
    groups = b[:, 2:].reshape(-1, 8, 8)
    which, scale = _signs_and_scale(groups[:, :, 4:])
    vectors = _looked_up(grid("IQ2_XXS", b.device), groups[:, :, :4])
    scale = half(b, 0).mul(scale.add_(0.5)).mul_(0.25)
    return _product(vectors, which, scale.view(-1, 8, 1, 1), 4)


def iq2_xs(b: torch.Tensor) -> torch.Tensor:
    """A group is 4 words of an index of 9 bits and 7 signs; each half of a group has a scale of 4 bits."""
    codes = words(b[:, 2:66], torch.int16)
    vectors = _looked_up(grid("IQ2_XS", b.device), codes & 511)
    which = _looked_up(even_signs(b.device), codes >> 9 & 127)
    return _product(vectors, which, _scales_of_halves(b[:, 66:], half(b, 0)), 2)


def iq2_s(b: torch.Tensor) -> torch.Tensor:
    """As IQ2_XS, with indices of 10 bits, of which the upper two are in bytes of their own, and 8 signs."""
    index = b[:, 2:34].to(torch.int32) | (run(b[:, 66:74], 2).to(torch.int32) << 8)
    vectors = _looked_up(grid("IQ2_S", b.device), index)
    which = _looked_up(signs(b.device), b[:, 34:66])
    return _product(vectors, which, _scales_of_halves(b[:, 74:], half(b, 0)), 2)


def iq3_xxs(b: torch.Tensor) -> torch.Tensor:
    """A group is 8 indices of 8 bits for vectors of 4; words as in IQ2_XXS follow all groups."""
    which, scale = _signs_and_scale(b[:, 66:].reshape(-1, 8, 4))
    vectors = _looked_up(grid("IQ3_XXS", b.device), b[:, 2:66])
    scale = half(b, 0).mul(scale.add_(0.5)).mul_(0.5)
    return _product(vectors, which, scale.view(-1, 8, 1, 1), 4)


def iq3_s(b: torch.Tensor) -> torch.Tensor:
    """A group is 8 indices of 9 bits, the upper ones in a byte of their own, 32 signs, and 4 bits of scale."""
    index = b[:, 2:66].to(torch.int32) | (run(b[:, 66:74], 1).to(torch.int32) << 8)
    vectors = _looked_up(grid("IQ3_S", b.device), index)
    which = _looked_up(signs(b.device), b[:, 74:106])
    scale = run(b[:, 106:], 4).to(torch.float32).mul_(2).add_(1).mul_(half(b, 0))
    return _product(vectors, which, scale.view(-1, 8, 1, 1), 4)


def iq1_s(b: torch.Tensor) -> torch.Tensor:
    """A group is 4 indices of 11 bits, a scale of 3 bits, and a bit that says which way all of it is shifted."""
    rest = words(b[:, 34:], torch.int16).unsqueeze(-1)
    index = b[:, 2:34].to(torch.int32).view(-1, 8, 4) | ((rest >> _steps(3, b) & 7) << 8)
    vectors = _looked_up(grid("IQ1_S", b.device), index).view(-1, 8, 32)
    scale = (rest >> 12 & 7).to(torch.float32).mul_(2).add_(1).mul_(half(b, 0).unsqueeze(-1))
    return vectors.add_(_shift(rest >> 15 & 1)).mul_(scale)


def iq1_m(b: torch.Tensor) -> torch.Tensor:
    """As IQ1_S, with a shift for each vector and a scale for each two; the scale of all lies in the words of theirs."""
    rest = run(b[:, 32:48], 4).to(torch.int32)
    index = b[:, :32].to(torch.int32) | ((rest & 7) << 8)
    vectors = _looked_up(grid("IQ1_S", b.device), index).view(-1, 16, 2, 8)
    packed = words(b[:, 48:], torch.int16)
    scale = (packed.unsqueeze(-1) >> _steps(3, b) & 7).to(torch.float32).mul_(2).add_(1).mul_(_spread(b).unsqueeze(-1))
    return vectors.add_(_shift(rest >> 3).view(-1, 16, 2, 1)).mul_(scale.view(-1, 16, 1, 1))


def _signs_and_scale(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take apart words (n, 8, 4 bytes): 4 times 7 signs, as float32 (n, ...), and above them a scale (n, 8)."""
    word = words(packed.flatten(1), torch.int32)
    which = _looked_up(even_signs(packed.device), word.unsqueeze(-1) >> _steps(7, packed) & 127)
    return which, (word >> 28 & 15).to(torch.float32)


def _scales_of_halves(packed: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return (n, 16, 1, 1): a scale of 4 bits for each half of a group."""
    return whole.mul(run(packed, 4).to(torch.float32).add_(0.5)).mul_(0.25).view(-1, 16, 1, 1)


def _spread(b: torch.Tensor) -> torch.Tensor:
    """Return the scale of an IQ1_M block, of which each of its last four words holds four bits at the top."""
    parts = (words(b[:, 48:], torch.int16) >> 12 & 15) << _steps(4, b)
    return parts.sum(1, keepdim=True).to(torch.int16).view(torch.float16).to(torch.float32)


def _shift(down: torch.Tensor) -> torch.Tensor:
    return 0.125 - down.to(torch.float32).mul_(0.25)


def _steps(bits: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(4, dtype=torch.int32, device=like.device) * bits


def _looked_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the vectors of the table for all indices of a block, one after the other: float32 (n * indices, width)."""
    return table.index_select(0, index.flatten().to(torch.int32))


def _product(vectors: torch.Tensor, which: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Multiply by signs and by scales (n, groups, 1, 1), of which each is for `rows` vectors of 8 elements."""
    groups = scale.shape[1]
    return vectors.view(-1, groups, rows, 8).mul_(which.view(-1, groups, rows, 8)).mul_(scale)
