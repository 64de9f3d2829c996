"""From elements and blocks to torch elements."""

from __future__ import annotations

import pytest

from tensorferry.core.boxes import Box, Region
from tensorferry.core.dtypes import DTYPES
from tensorferry.numerics.units import blocks_to_torch, to_torch


def test_ordinary_types_are_counted_alike() -> None:
    region = Region((4, 2), Box((1, 0), (2, 2)))
    assert to_torch(region, DTYPES["BF16"]) is region
    assert blocks_to_torch(region.box, DTYPES["BF16"]) is region.box


def test_two_f4_are_one_torch_element() -> None:
    region = Region((4, 8), Box((1, 2), (2, 6)))
    assert to_torch(region, DTYPES["F4"]) == Region((4, 4), Box((1, 1), (2, 3)))


def test_four_f6_are_three_bytes() -> None:
    region = Region((4, 8), Box((1, 4), (2, 8)))
    assert to_torch(region, DTYPES["F6_E2M3"]) == Region((4, 6), Box((1, 3), (2, 6)))
    assert blocks_to_torch(Box((1, 1), (2, 2)), DTYPES["F6_E2M3"]) == Box((1, 3), (2, 6))


def test_rows_that_are_no_whole_blocks_are_flat() -> None:
    assert to_torch(Region.whole((2, 3)), DTYPES["F4"]) == Region.whole((3,))
    with pytest.raises(ValueError, match="cuts through a block of 2 F4 elements"):
        to_torch(Region((2, 3), Box((0, 0), (1, 3))), DTYPES["F4"])
