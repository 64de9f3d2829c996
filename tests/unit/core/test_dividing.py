"""A rank's part of a parameter takes its part of every slot, or none."""

from __future__ import annotations

import pytest

from tensorferry.core.boxes import Box, Region
from tensorferry.core.dividing import divided
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.errors import PlanError

F32 = DTYPES["F32"]


def rows(shape: tuple[int, ...], start: int, stop: int) -> Region:
    return Region(shape, Box((start, *(0 for _ in shape[1:])), (stop, *shape[1:])))


def test_rows_of_a_plain_parameter() -> None:
    part = divided(TargetTensor.plain("w", F32, (6, 2)), rows((6, 2), 2, 4), (2, 2))
    assert part.shape == (2, 2)
    assert part.slots == {"": Slot(Region.whole((2, 2)), (6, 2), rows((6, 2), 2, 4))}


def test_a_packed_parameter_is_taken_half_by_half() -> None:
    """Gate above up in one entry of eight rows: rank 1 of 2 has rows 2, 3 and 6, 7."""
    halves = Region((2, 4, 3), Box((0, 2, 0), (2, 4, 3)))
    slot = divided(TargetTensor.plain("w", F32, (8, 3)), halves, (4, 3)).slots[""]
    assert slot.window == halves
    assert slot.local.size == 12


def test_slots_of_other_ranks_experts_are_absent_and_the_others_are_cut() -> None:
    """Two experts of gate and up, each from an entry of its own; the rank has half of expert 1."""
    whole = (2, 4, 3)
    slots = {
        f"{e}.{half}": Slot.of(Region(whole, Box((e, 2 * n, 0), (e + 1, 2 * n + 2, 3))), (2, 3))
        for e in range(2)
        for n, half in enumerate(("gate", "up"))
    }
    part = Region((2, 2, 2, 3), Box((1, 0, 1, 0), (2, 2, 2, 3)))
    mine = divided(TargetTensor("w", F32, whole, slots), part, (1, 2, 3))
    assert mine.absent == {"0.gate", "0.up"}
    assert mine.slots["1.gate"].window.box == Box((1, 0), (2, 3))
    assert mine.slots["1.gate"].local.box == Box((0, 0, 0), (1, 1, 3))
    assert mine.slots["1.up"].local.box == Box((0, 1, 0), (1, 2, 3))


def test_what_is_no_region_of_the_logical_tensor_is_refused() -> None:
    """A slot of two flat elements in a row, cut where its logical tensor has columns."""
    slot = Slot(Region((6,), Box((1,), (5,))), (2, 2), Region.whole((2, 2)))
    tensor = TargetTensor("w", F32, (6,), {"": slot})
    with pytest.raises(PlanError, match="w cannot be divided among ranks"):
        divided(tensor, Region((3, 2), Box((0, 0), (2, 2))), (4,))
