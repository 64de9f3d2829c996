"""Pieces of a region: which bytes, worked out by hand for small tensors."""

from __future__ import annotations

from helpers.core_values import columns, rows
from tensorferry.core.boxes import Box, Region
from tensorferry.core.cost import ReadCost
from tensorferry.core.cutting import Cut, cut, in_blocks
from tensorferry.core.dtypes import DTYPES

EXACT = ReadCost(max_gap=0, max_read=1 << 30, waste=1.0)


def test_a_whole_tensor_is_one_piece() -> None:
    assert list(cut(Region.whole((4, 3)), 2, EXACT)) == [Cut(Box((0, 0), (4, 3)), 0, 24, 24, (3, 1))]


def test_rows_are_one_piece() -> None:
    assert list(cut(rows((4, 3), 1, 3), 2, EXACT)) == [Cut(Box((1, 0), (3, 3)), 6, 12, 12, (3, 1))]


def test_columns_are_runs_that_come_without_the_holes_where_these_are_not_worth_reading() -> None:
    (piece,) = cut(columns((3, 4), 1, 3), 2, EXACT)
    assert piece == Cut(Box((0, 1), (3, 3)), 2, 12, 12, (2, 1), times=3, stride=8)


def test_runs_of_a_read_are_as_many_as_a_read_may_hold() -> None:
    pieces = list(cut(columns((5, 4), 1, 3), 1, ReadCost(0, 4, 1.0)))
    assert [(p.offset, p.length, p.times, p.stride) for p in pieces] == [(1, 4, 2, 4), (9, 4, 2, 4), (17, 2, 1, 0)]


def test_a_run_may_itself_hold_small_holes() -> None:
    corner = Region((3, 2, 4), Box((0, 0, 0), (3, 2, 3)))
    wide = Region((3, 100, 4), Box((0, 0, 0), (3, 2, 3)))
    assert [(p.length, p.times) for p in cut(corner, 1, ReadCost(1, 1 << 30, 2.0))] == [(23, 1)]
    (piece,) = cut(wide, 1, ReadCost(1, 1 << 30, 2.0))
    assert (piece.length, piece.times, piece.stride, piece.strides) == (21, 3, 400, (7, 4, 1))


def test_columns_are_one_piece_where_the_holes_are_small_enough() -> None:
    assert list(cut(columns((2, 4), 1, 3), 1, ReadCost(2, 1 << 30, 2.0))) == [Cut(Box((0, 1), (2, 3)), 1, 6, 4, (4, 1))]


def test_columns_stay_apart_where_too_much_would_be_wasted() -> None:
    assert [p.times for p in cut(columns((2, 4), 1, 3), 1, ReadCost(2, 1 << 30, 1.4))] == [2]


def test_a_large_tensor_is_cut_into_reads_of_whole_rows() -> None:
    pieces = list(cut(Region.whole((5, 4)), 1, ReadCost(0, 9, 1.0)))
    assert [(p.offset, p.length) for p in pieces] == [(0, 8), (8, 8), (16, 4)]


def test_a_row_that_is_larger_than_a_read_is_cut_itself() -> None:
    pieces = list(cut(Region.whole((2, 5)), 1, ReadCost(0, 3, 1.0)))
    assert [(p.offset, p.length) for p in pieces] == [(0, 3), (3, 2), (5, 3), (8, 2)]


def test_a_transposed_tensor_is_one_piece() -> None:
    assert list(cut(Region.whole((3, 4)), 1, EXACT, strides=(1, 3))) == [Cut(Box((0, 0), (3, 4)), 0, 12, 12, (1, 3))]


def test_a_column_of_a_transposed_tensor_lies_in_a_row() -> None:
    assert list(cut(columns((3, 4), 1, 2), 1, EXACT, strides=(1, 3))) == [Cut(Box((0, 1), (3, 2)), 3, 3, 3, (1, 3))]


def test_an_expanded_tensor_is_read_once() -> None:
    (piece,) = cut(Region.whole((3, 4)), 2, EXACT, strides=(0, 1))
    assert (piece.offset, piece.length) == (0, 8)


def test_nothing_of_a_tensor_is_no_piece() -> None:
    assert list(cut(rows((4, 3), 2, 2), 1, EXACT)) == []


def test_packed_types_are_counted_in_blocks() -> None:
    assert in_blocks(columns((2, 8), 2, 6), DTYPES["F4"]) == columns((2, 4), 1, 3)


def test_a_region_through_a_block_cannot_be_counted_in_blocks() -> None:
    assert in_blocks(columns((2, 8), 1, 6), DTYPES["F4"]) is None


def test_a_whole_packed_tensor_with_odd_rows_is_one_flat_row() -> None:
    assert in_blocks(Region.whole((2, 3)), DTYPES["F4"]) == Region.whole((3,))
