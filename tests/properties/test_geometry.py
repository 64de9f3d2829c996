"""Boxes, regions, runs, pieces and windows against numpy's own indexing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from helpers.core_values import catalogue_of
from helpers.random_plans import boxes, regions, shapes, views
from tensorferry.core.boxes import Box, Region, Shape, strides_of
from tensorferry.core.cost import ReadCost
from tensorferry.core.coverage import check_slots, flat_runs, uncovered
from tensorferry.core.cutting import cut
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.planning import make_plan
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.problems import ProblemKind

EXAMPLES = settings(max_examples=300, deadline=None)


def marked(shape: Shape, box: Box) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    mask = np.zeros(shape, dtype=np.bool_)
    mask[box.slices] = True
    return mask


@st.composite
def a_shape_and(draw: st.DrawFn, *, count: int = 1) -> tuple[Shape, list[Box]]:
    shape = draw(shapes())
    return shape, [draw(boxes(shape)) for _ in range(count)]


@EXAMPLES
@given(a_shape_and(count=2))
def test_boxes_meet_where_both_are(case: tuple[Shape, list[Box]]) -> None:
    shape, (one, other) = case
    both = marked(shape, one) & marked(shape, other)
    common = one.meet(other)
    assert common == other.meet(one)
    assert (marked(shape, common) if common else np.zeros_like(both)).tolist() == both.tolist()


@EXAMPLES
@given(a_shape_and(), st.integers(1, 4))
def test_rows_tile_a_box_in_order(case: tuple[Shape, list[Box]], most: int) -> None:
    shape, (box,) = case
    every = np.arange(prod(shape)).reshape(shape)
    parts = list(box.rows(most))
    assert [i for part in parts for i in every[part.slices].flat] == list(every[box.slices].flat)
    outermost = next((d for d, n in enumerate(box.shape) if n > 1), None)
    assert outermost is None or all(part.shape[outermost] <= most for part in parts)


@EXAMPLES
@given(a_shape_and(), st.data())
def test_a_box_relative_to_another_selects_the_same_from_it(case: tuple[Shape, list[Box]], data: st.DataObject) -> None:
    shape, (outer,) = case
    every = np.arange(prod(shape)).reshape(shape)
    inner = data.draw(boxes(outer.shape)).shift(outer.start)
    assert inner.inside(shape)
    assert every[outer.slices][inner.relative_to(outer).slices].tolist() == every[inner.slices].tolist()


@EXAMPLES
@given(shapes(), st.data())
def test_a_part_of_a_region_is_that_part_of_what_it_selects(shape: Shape, data: st.DataObject) -> None:
    region = data.draw(regions(shape))
    assert region.fits(shape)
    every = np.arange(prod(shape)).reshape(region.view)
    part = data.draw(boxes(region.shape))
    assert every[region.part(part).box.slices].tolist() == every[region.box.slices][part.slices].tolist()


@EXAMPLES
@given(shapes(), st.data())
def test_runs_are_what_indexing_selects(shape: Shape, data: st.DataObject) -> None:
    region = data.draw(regions(shape))
    selected = np.arange(prod(shape)).reshape(region.view)[region.box.slices].reshape(-1).tolist()
    runs = list(flat_runs(region))
    assert [i for a, b in runs for i in range(a, b)] == selected
    assert all(b < c for (_, b), (c, _) in pairwise(runs)), "neighbours should be one run"


costs = st.builds(ReadCost, st.sampled_from([0, 1, 4, 30]), st.integers(1, 100), st.sampled_from([1.0, 2.0, 9.0]))


@EXAMPLES
@given(shapes(), st.sampled_from([1, 2, 4, 8]), costs, st.data())
def test_pieces_are_the_region_in_order_and_their_bytes_are_its_elements(
    shape: Shape, unit: int, cost: ReadCost, data: st.DataObject
) -> None:
    region = data.draw(regions(shape))
    memory = np.arange(prod(shape), dtype=f"<u{unit}")
    check_pieces(memory, region, strides_of(region.view), None, unit, cost, in_order=True)


@EXAMPLES
@given(shapes(), st.sampled_from([1, 4]), costs, st.data())
def test_pieces_of_any_strided_view_are_its_elements(
    shape: Shape, unit: int, cost: ReadCost, data: st.DataObject
) -> None:
    strides = tuple(data.draw(st.integers(0, 12)) for _ in shape)
    memory = np.arange(1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)), dtype=f"<u{unit}")
    region = Region(shape, data.draw(boxes(shape)))
    check_pieces(memory, region, strides, strides, unit, cost, in_order=False)


def check_pieces(
    memory: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
    region: Region,
    steps: Sequence[int],
    given: Shape | None,
    unit: int,
    cost: ReadCost,
    *,
    in_order: bool,
) -> None:
    """Cut a region of a view of `memory` and hold each piece, taken by offset and length alone, against indexing."""
    inner = [s * unit for s in steps]
    tensor = as_strided(memory, region.view, inner, writeable=False)
    found = np.zeros(region.view, dtype=int)
    order: list[int] = []
    for box, offset, length, needed, strides, count, stride in cut(region, unit, cost, given):
        assert (count > 1) == (stride > 0)
        starts, run = [offset + i * stride for i in range(count)], length // count
        part = np.concatenate([memory.view(np.uint8)[at : at + run] for at in starts])
        assert len(part) == length, "a piece leaves the memory"
        assert count == 1 or stride > run, "runs that touch are one range"
        assert length == unit + sum((n - 1) * s * unit for n, s in zip(box.shape, strides, strict=True))
        as_read = [s * unit for s in strides]
        assert as_strided(part.view(memory.dtype), box.shape, as_read).tolist() == tensor[box.slices].tolist()
        assert needed == box.size * unit
        assert length <= max(cost.max_read, unit)
        assert length <= cost.waste * needed or not in_order
        found[box.slices] += 1
        order += np.arange(prod(region.view)).reshape(region.view)[box.slices].reshape(-1).tolist()
    assert (found == marked(region.view, region.box)).all()
    assert not in_order or order == sorted(order)


@EXAMPLES
@given(shapes(most=12), st.integers(1, 5), st.data())
def test_what_all_ranks_read_tiles_the_entry(shape: Shape, ranks: int, data: st.DataObject) -> None:
    """Also along any dimension of any reshape, and where ranks have unequal shares, or none."""
    view = data.draw(views(shape)) or (1,)
    dim = data.draw(st.integers(0, len(view) - 1))
    borders = [
        0,
        *sorted(data.draw(st.lists(st.integers(0, view[dim]), min_size=ranks - 1, max_size=ranks - 1))),
        view[dim],
    ]
    read: list[int] = []
    for a, b in pairwise(borders):
        start, stop = [0] * len(view), list(view)
        start[dim], stop[dim] = a, b
        window = Region(view, Box(tuple(start), tuple(stop)))
        share = TargetTensor("w", DTYPES["F32"], window.shape, {"": Slot(Region.whole(window.shape), shape, window)})
        plan = make_plan(catalogue_of({"w": shape}), {"w": share})
        assert not plan.problems
        read += [i for step in plan.steps for s in step.sources for x, y in flat_runs(s.region) for i in range(x, y)]
    assert sorted(read) == list(range(prod(shape)))


@st.composite
def slotted(draw: st.DrawFn) -> TargetTensor:
    """A parameter with random slots: parts of a random tiling, some of them moved, doubled or left out."""
    shape = draw(shapes(rank=3))
    parts = (
        [Region.whole(shape)] if draw(st.booleans()) else [draw(regions(shape)) for _ in range(draw(st.integers(1, 3)))]
    )
    while draw(st.booleans()) and len(parts) < 6:
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        cuttable = [d for d, n in enumerate(part.shape) if n > 1]
        if not cuttable:
            parts.append(part)
            break
        d = draw(st.sampled_from(cuttable))
        at = draw(st.integers(part.box.start[d] + 1, part.box.stop[d] - 1))
        start, stop = list(part.box.start), list(part.box.stop)
        stop[d], start[d] = at, at
        parts += [
            Region(part.view, Box(part.box.start, tuple(stop))),
            Region(part.view, Box(tuple(start), part.box.stop)),
        ]
    if draw(st.integers(0, 3)) == 0 and len(parts) > 1:
        parts.pop()
    slots = {str(i): Slot(p, p.shape, Region.whole(p.shape)) for i, p in enumerate(parts)}
    return TargetTensor("w", DTYPES["F32"], shape, slots)


@settings(max_examples=300, deadline=None)
@given(slotted())
def test_coverage_says_what_counting_says(tensor: TargetTensor) -> None:
    count = np.zeros(prod(tensor.shape), dtype=int)
    for slot in tensor.slots.values():
        count[np.arange(count.size).reshape(slot.local.view)[slot.local.box.slices].reshape(-1)] += 1
    kinds = {p.kind for p in check_slots(tensor)}
    assert (ProblemKind.OVERLAP in kinds) == bool((count > 1).any())
    assert (ProblemKind.GAP in kinds) == bool((count == 0).any() and not (count > 1).any())
    assert (kinds == set()) == bool((count == 1).all())
    if not (count > 1).any():
        holes = [i for hole in uncovered(tensor) for a, b in flat_runs(hole) for i in range(a, b)]
        assert holes == np.flatnonzero(count == 0).tolist()
