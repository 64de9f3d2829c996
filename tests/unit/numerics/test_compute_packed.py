"""Transforms of packed entries, whole and in part: what only moves rows moves packed ones, and numbers come of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tensorferry.core.boxes import Box, Region
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.steps import as_numbers
from tensorferry.core.transforms import Add, Chain, Dequantize, Permute, TensorSpec, Transform, Transpose
from tensorferry.numerics.casts import Loss
from tensorferry.numerics.compute import compute, compute_into
from tensorferry.numerics.dequantize import dequantize
from tensorferry.numerics.units import to_torch

Q8_0 = DTYPES["Q8_0"]
HEADS, HALF, WIDTH = 3, 2, 64
SPEC = TensorSpec(Q8_0, (HEADS * 2 * HALF, WIDTH))
TO_HALVES = Permute((HEADS, HALF, 2, WIDTH), (0, 2, 1, 3))


def packed() -> torch.Tensor:
    """Random codes with scales from 1 to 2."""
    raw = np.random.default_rng(5).integers(0, 256, (*SPEC.shape[:1], 2, 34), dtype=np.uint8)
    raw[:, :, 1] = 0x3C
    return torch.from_numpy(raw.reshape(SPEC.shape[0], -1))


NUMBERS = dequantize(Q8_0, packed())
IN_HALVES = NUMBERS.view(HEADS, HALF, 2, WIDTH).transpose(1, 2).reshape(SPEC.shape)
CASES: list[tuple[Transform | None, torch.Tensor]] = [
    (None, NUMBERS),
    (TO_HALVES, IN_HALVES),
    (Transpose((1, 0)), NUMBERS.t()),
    (Add(-1), NUMBERS - 1),
    (Chain((TO_HALVES, Transpose((1, 0)))), IN_HALVES.t()),
    (Chain((TO_HALVES, Add(-1))), IN_HALVES - 1),
    (Chain((Transpose((1, 0)), Transpose((1, 0)))), NUMBERS),
]


def parts_for(via: Transform, out: Box) -> list[torch.Tensor]:
    (box,) = via.pull(out, [SPEC])
    return [packed()[to_torch(Region(SPEC.shape, box), Q8_0).box.slices]]


def outs(shape: Sequence[int]) -> list[Box]:
    rows, columns = shape
    whole = Box.whole((rows, columns))
    bands = [Box((a, 0), (a + 1, columns)) for a in range(rows)] + [Box((0, a), (rows, a + 1)) for a in range(columns)]
    return [whole, Box((1, 3), (rows, columns - 5)), *bands]


@pytest.mark.parametrize(("via", "expected"), CASES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_numbers_are_transformed_whole_and_in_part(
    via: Transform | None, expected: torch.Tensor, kind: torch.dtype
) -> None:
    numbers = as_numbers(via, SPEC.shape)
    assert numbers.infer([SPEC]) == TensorSpec(DTYPES["F32"], tuple(expected.shape))
    for out in outs(expected.shape):
        parts = parts_for(numbers, out)
        assert torch.equal(compute(numbers, parts, [SPEC], out), expected[out.slices])
        into = torch.zeros(out.shape, dtype=kind)
        assert compute_into(numbers, parts, [SPEC], out, into) == Loss()
        assert torch.equal(into, expected[out.slices].to(kind))


def test_rows_are_moved_before_they_are_numbers() -> None:
    assert as_numbers(TO_HALVES, SPEC.shape) == Chain((TO_HALVES, Dequantize()))
    assert as_numbers(Chain((TO_HALVES, Add(1), TO_HALVES)), SPEC.shape) == Chain(
        (TO_HALVES, Dequantize(), Add(1), TO_HALVES)
    )


def test_what_would_cut_blocks_works_on_numbers() -> None:
    across = Permute((HEADS * HALF * 2, 2, WIDTH // 2), (0, 2, 1))
    assert as_numbers(across, SPEC.shape) == Chain((Dequantize(), across))
    assert as_numbers(Transpose((1, 0)), SPEC.shape) == Chain((Dequantize(), Transpose((1, 0))))
