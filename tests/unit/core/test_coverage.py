"""Whether slots cover a parameter exactly once."""

from __future__ import annotations

import pytest

from helpers.core_values import columns, rows, slot
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.coverage import check_slots, flat_runs, uncovered
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.problems import ProblemKind


def tensor(shape: Shape, *locals_: Region, default: float | None = None) -> TargetTensor:
    slots = {str(i): slot(local, local.shape) for i, local in enumerate(locals_)}
    return TargetTensor("w", DTYPES["F32"], shape, slots, default)


def test_gate_above_up_is_fine() -> None:
    assert check_slots(tensor((8, 3), rows((8, 3), 0, 4), rows((8, 3), 4, 8))) == []


def test_interleaved_gate_and_up_are_fine() -> None:
    gate, up = (Region((4, 2, 3), Box((0, i, 0), (4, i + 1, 3))) for i in range(2))
    assert check_slots(tensor((8, 3), gate, up)) == []


def test_slots_seen_through_different_views_are_fine() -> None:
    halves = Region((2, 12), Box((0, 0), (1, 12))), Region((24,), Box((12,), (24,)))
    assert check_slots(tensor((8, 3), *halves)) == []


def test_a_gap_is_found_and_counted() -> None:
    (problem,) = check_slots(tensor((8, 3), rows((8, 3), 0, 4), rows((8, 3), 5, 8)))
    assert problem.kind is ProblemKind.GAP
    assert "cover 21 of 24 elements" in problem.detail


def test_an_overlap_is_found_and_both_slots_named() -> None:
    (problem,) = check_slots(tensor((8, 3), rows((8, 3), 0, 5), rows((8, 3), 4, 8)))
    assert (problem.kind, problem.detail) == (ProblemKind.OVERLAP, "slots '0' and '1' overlap")


def test_an_overlap_that_makes_up_for_a_gap_is_found() -> None:
    (problem,) = check_slots(tensor((8, 3), rows((8, 3), 0, 4), rows((8, 3), 3, 7)))
    assert problem.kind is ProblemKind.OVERLAP


def test_two_slots_for_one_scalar_overlap() -> None:
    (problem,) = check_slots(tensor((), Region.whole(()), Region.whole(())))
    assert problem.kind is ProblemKind.OVERLAP


def test_an_overlap_of_different_views_is_found() -> None:
    (problem,) = check_slots(tensor((4, 4), columns((4, 4), 0, 2), Region((16,), Box((1,), (9,)))))
    assert problem.kind is ProblemKind.OVERLAP


def test_a_slot_of_another_shape_is_found() -> None:
    (problem,) = check_slots(tensor((8, 3), Region.whole((8, 4))))
    assert (problem.kind, problem.detail) == (ProblemKind.SHAPE, "slot '0' is no region of its shape (8, 3)")


def test_a_parameter_without_slots_is_a_gap() -> None:
    assert [p.kind for p in check_slots(TargetTensor("w", DTYPES["F32"], (2,)))] == [ProblemKind.GAP]


def test_padding_with_a_default_is_no_gap_and_is_what_is_uncovered() -> None:
    padded = tensor((10, 2), rows((10, 2), 0, 7), default=0.0)
    assert check_slots(padded) == []
    assert uncovered(padded) == [Region((20,), Box((14,), (20,)))]


def test_nothing_of_a_full_parameter_is_uncovered() -> None:
    assert uncovered(tensor((2, 2), Region.whole((2, 2)), default=0.0)) == []


def test_an_empty_parameter_needs_nothing() -> None:
    assert check_slots(tensor((0, 4), Region.whole((0, 4)))) == []


@pytest.mark.parametrize(
    ("region", "runs"),
    [
        (Region.whole((2, 3)), [(0, 6)]),
        (rows((4, 3), 1, 3), [(3, 9)]),
        (columns((3, 4), 1, 3), [(1, 3), (5, 7), (9, 11)]),
        (Region((2, 2, 2), Box((0, 1, 0), (2, 2, 2))), [(2, 4), (6, 8)]),
        (Region.whole(()), [(0, 1)]),
        (rows((4, 3), 2, 2), []),
    ],
)
def test_the_runs_of_a_region(region: Region, runs: list[tuple[int, int]]) -> None:
    assert list(flat_runs(region)) == runs


def test_a_slot_takes_as_many_elements_as_it_fills() -> None:
    with pytest.raises(ValueError, match="takes 12 elements for 6"):
        Slot(Region.whole((2, 3)), (4, 3), Region.whole((4, 3)))


def test_a_window_is_a_region_of_the_logical_tensor() -> None:
    with pytest.raises(ValueError, match="no region of the logical shape"):
        Slot(Region.whole((2, 3)), (4, 4), rows((4, 3), 0, 2))


def test_a_slot_of_a_part_of_a_parameter_takes_the_whole_of_its_logical_tensor() -> None:
    whole = Slot.of(rows((8, 3), 0, 4), (4, 3))
    assert whole.window == Region.whole((4, 3))
    with pytest.raises(ValueError, match="takes 9 elements for 12"):
        Slot.of(rows((8, 3), 0, 4), (3, 3))
