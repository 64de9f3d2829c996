"""A copy between two regions moves the elements that indexing moves."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.core.boxes import Box, Region
from tensorferry.modules.views import Copy, TooScattered, between


@st.composite
def regions(draw: st.DrawFn) -> Region:
    view = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, n - 1)) for n in view)
    return Region(view, Box(start, tuple(draw(st.integers(a + 1, n)) for a, n in zip(start, view, strict=True))))


def positions(copy: Copy) -> list[tuple[int, int]]:
    found = [(copy.into, copy.source)]
    for size, into, source in copy.axes:
        found = [(a + i * into, b + i * source) for a, b in found for i in range(size)]
    return found


def indexed(region: Region) -> list[int]:
    grid = torch.arange(prod(region.view)).view(region.view)
    positions: list[int] = grid[region.box.slices].flatten().tolist()
    return positions


@given(regions(), regions())
def test_each_element_goes_where_its_turn_says(into: Region, source: Region) -> None:
    if into.size != source.size:
        source = Region((into.size,), Box((0,), (into.size,)))
    try:
        copy = between(into, source)
    except TooScattered:
        return
    assert positions(copy) == list(zip(indexed(into), indexed(source), strict=True))
