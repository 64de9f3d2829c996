"""Boxes and regions: integer geometry, with values worked out by hand."""

from __future__ import annotations

import pytest

from tensorferry.core.boxes import Box, Region, strides_of


def test_strides_are_row_major() -> None:
    assert strides_of((2, 3, 4)) == (12, 4, 1)
    assert strides_of(()) == ()


def test_a_box_has_the_shape_and_size_of_what_is_between_start_and_stop() -> None:
    box = Box((1, 0), (3, 4))
    assert (box.shape, box.size) == ((2, 4), 8)


def test_the_box_of_a_scalar_has_one_element() -> None:
    assert Box.whole(()).size == 1


def test_boxes_meet_in_their_common_part() -> None:
    assert Box((0, 0), (2, 4)).meet(Box((1, 3), (5, 5))) == Box((1, 3), (2, 4))


def test_boxes_that_only_touch_do_not_meet() -> None:
    assert Box((0,), (2,)).meet(Box((2,), (4,))) is None


def test_an_empty_box_meets_nothing() -> None:
    assert Box((1,), (1,)).meet(Box((0,), (4,))) is None


def test_shifting_moves_both_ends() -> None:
    assert Box((1, 2), (3, 4)).shift((10, 0)) == Box((11, 2), (13, 4))


def test_a_box_relative_to_the_one_that_holds_it_starts_at_their_distance() -> None:
    assert Box((5, 2), (6, 4)).relative_to(Box((4, 1), (9, 9))) == Box((1, 1), (2, 3))


@pytest.mark.parametrize(
    "box",
    [Box((0,), (3,)), Box((0, 0), (3, 5)), Box((-1, 0), (1, 4)), Box((2, 0), (1, 4)), Box((0, 0), (3,))],
    ids=["another rank", "too far", "negative", "reversed", "ragged"],
)
def test_a_box_is_not_inside_a_shape_that_does_not_hold_it(box: Box) -> None:
    assert not box.inside((3, 4))


def test_rows_cut_along_the_outermost_dimension_that_has_an_extent() -> None:
    assert list(Box((4, 0, 0), (5, 5, 2)).rows(2)) == [
        Box((4, 0, 0), (5, 2, 2)),
        Box((4, 2, 0), (5, 4, 2)),
        Box((4, 4, 0), (5, 5, 2)),
    ]


def test_a_box_of_one_element_is_one_row() -> None:
    assert list(Box((1, 1), (2, 2)).rows(3)) == [Box((1, 1), (2, 2))]


def test_a_region_fits_a_shape_with_as_many_elements_as_its_view() -> None:
    odd_rows = Region((4, 2, 3), Box((0, 1, 0), (4, 2, 3)))
    assert odd_rows.fits((8, 3))
    assert odd_rows.fits((24,))
    assert not odd_rows.fits((8, 4))


def test_a_region_is_whole_only_if_nothing_is_left_out() -> None:
    assert Region.whole((2, 3)).is_whole
    assert not Region((2, 3), Box((0, 0), (2, 2))).is_whole


def test_a_part_of_a_region_is_given_in_the_coordinates_of_the_region() -> None:
    upper_half = Region((8, 3), Box((4, 0), (8, 3)))
    assert upper_half.part(Box((1, 0), (2, 3))) == Region((8, 3), Box((5, 0), (6, 3)))
