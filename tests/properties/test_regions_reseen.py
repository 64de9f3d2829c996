"""A region seen as another view has the same elements in the same order, and is found wherever there is one."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from tensorferry.core.boxes import Box, Region, Shape, strides_of

VIEWS: list[Shape] = [(12,), (3, 4), (2, 6), (2, 3, 2), (1, 12), (4, 3), (2, 2, 3), (12, 1), (3, 1, 4), (3, 2, 2)]


def positions(region: Region) -> list[int]:
    indices = product(*(range(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True)))
    strides = strides_of(region.view)
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]


@st.composite
def regions(draw: st.DrawFn) -> Region:
    view = draw(st.sampled_from(VIEWS))
    start = tuple(draw(st.integers(0, n - 1)) for n in view)
    stop = tuple(draw(st.integers(a + 1, n)) for a, n in zip(start, view, strict=True))
    return Region(view, Box(start, stop))


def boxes_of(view: Shape, size: int) -> list[Region]:
    extents = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in view]
    found = (Box(tuple(a for a, _ in each), tuple(b for _, b in each)) for each in product(*extents))
    return [Region(view, box) for box in found if box.size == size]


@given(regions(), st.sampled_from(VIEWS))
def test_the_elements_are_the_same_and_no_box_is_overlooked(region: Region, view: Shape) -> None:
    seen = region.seen_as(view)
    if seen is None:
        assert all(positions(other) != positions(region) for other in boxes_of(view, region.size))
    else:
        assert seen.view == view
        assert positions(seen) == positions(region)


def test_another_number_of_elements_is_no_other_view() -> None:
    assert Region.whole((2, 3)).seen_as((7,)) is None
    assert prod((2, 3)) == 6


def test_scalars_can_be_seen_as_one_element() -> None:
    assert Region.whole(()).seen_as((1, 1)) == Region.whole((1, 1))
    assert Region.whole((1,)).seen_as(()) == Region.whole(())
