"""Transforms as descriptions: what comes out, which input parts an output part needs, what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.transform_json import transform_from_json
from tensorferry.core.transforms import (
    Add,
    Chain,
    Concat,
    Custom,
    Stack,
    Take,
    TensorSpec,
    Transform,
    Transpose,
)  # fmt: skip
from tensorferry.errors import RuleError


def spec(*shape: int, dtype: str = "F32") -> TensorSpec:
    return TensorSpec(DTYPES[dtype], shape)


TAKE = Take(Region((2, 2, 3), Box((0, 1, 0), (2, 2, 3))), (2, 3))


@pytest.mark.parametrize(
    ("via", "inputs", "shape"),
    [
        (Transpose((1, 0)), [spec(2, 3)], (3, 2)),
        (Transpose((2, 0, 1)), [spec(2, 3, 4)], (4, 2, 3)),
        (Add(1.0), [spec(5)], (5,)),
        (Stack(0), [spec(2, 3)] * 4, (4, 2, 3)),
        (Stack(2), [spec(2, 3)] * 4, (2, 3, 4)),
        (Concat(0), [spec(2, 3), spec(1, 3)], (3, 3)),
        (Concat(1), [spec(2, 3), spec(2, 1)], (2, 4)),
        (TAKE, [spec(4, 3)], (2, 3)),
        (Chain((Stack(0), Transpose((0, 2, 1)))), [spec(2, 3)] * 4, (4, 3, 2)),
        (Custom("f", spec(7)), [spec(1), spec(2)], (7,)),
    ],
)
def test_the_shape_that_comes_out(via: Transform, inputs: list[TensorSpec], shape: Shape) -> None:
    assert via.infer(inputs) == spec(*shape)


@pytest.mark.parametrize(
    ("via", "inputs"),
    [
        (Transpose((1, 0)), [spec(2, 3, 4)]),
        (Transpose((0, 0)), [spec(2, 3)]),
        (Transpose((1, 0)), [spec(2, 4, dtype="F4")]),
        (Add(1.0), [spec(1), spec(1)]),
        (Stack(0), []),
        (Stack(0), [spec(2), spec(3)]),
        (Stack(-1), [spec(2), spec(2)]),
        (Stack(1), [spec(2, dtype="F4"), spec(2, dtype="F4")]),
        (Concat(0), [spec(2, 3), spec(2, 4)]),
        (Concat(1), [spec(2), spec(2)]),
        (Concat(-1), [spec(2), spec(2)]),
        (Concat(0), [spec(2), spec(2, dtype="BF16")]),
        (TAKE, [spec(4, 4)]),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_a_reason(via: Transform, inputs: list[TensorSpec]) -> None:
    with pytest.raises(ValueError, match=r".{10,}"):
        via.infer(inputs)


def test_a_transposed_part_comes_from_the_transposed_box() -> None:
    assert Transpose((1, 0)).pull(Box((0, 1), (3, 2)), [spec(2, 3)]) == [Box((1, 0), (2, 3))]


def test_a_stacked_part_comes_from_the_experts_in_it() -> None:
    nothing, first = Box((1, 0), (1, 0)), Box((1, 0), (2, 3))
    assert Stack(0).pull(Box((1, 1, 0), (2, 2, 3)), [spec(2, 3)] * 3) == [nothing, first, nothing]


def test_a_part_across_a_seam_comes_from_both_sides() -> None:
    assert Concat(0).pull(Box((1, 0), (3, 3)), [spec(2, 3), spec(2, 3)]) == [Box((1, 0), (2, 3)), Box((0, 0), (1, 3))]


def test_a_chain_pulls_through_every_step() -> None:
    chain = Chain((Concat(0), Transpose((1, 0))))
    assert chain.pull(Box((0, 0), (1, 3)), [spec(2, 4), spec(2, 4)]) == [Box((0, 0), (2, 1)), Box((0, 0), (1, 1))]


def test_a_custom_function_needs_everything() -> None:
    assert Custom("f", spec(9)).pull(Box((0,), (1,)), [spec(2), spec(3)]) == [Box((0,), (2,)), Box((0,), (3,))]


@pytest.mark.parametrize(
    "via",
    [TAKE, Transpose((2, 0, 1)), Add(-1.0), Stack(1), Concat(2), Chain((Stack(0), Add(1.0))), Custom("f", spec(2))],
    ids=lambda via: via.op,
)
def test_json_gives_the_same_transform_back(via: Transform) -> None:
    assert transform_from_json(via.to_json()) == via


def test_an_unknown_operation_is_refused() -> None:
    unknown: dict[str, Any] = {"op": "eval"}
    with pytest.raises(RuleError, match="no transform is called 'eval'"):
        transform_from_json(unknown)


def test_undoing_a_transpose_gives_the_order_back() -> None:
    assert Transpose((2, 0, 1)).inverse() == Transpose((1, 2, 0))


def test_a_take_needs_of_an_entry_only_what_is_asked_of_it() -> None:
    expert = Take(Region((4, 6, 5), Box((2, 0, 0), (3, 6, 5))), (6, 5))
    assert expert.pull(Box((1, 0), (3, 5)), [spec(4, 6, 5)]) == [Box((2, 1, 0), (3, 3, 5))]
    rows = Take(Region((8, 3), Box((4, 0), (6, 3))), (2, 3))
    assert rows.pull(Box((1, 1), (2, 3)), [spec(8, 3)]) == [Box((5, 1), (6, 3))]


def test_a_take_that_reshapes_needs_all_of_an_entry() -> None:
    assert TAKE.pull(Box((0, 0), (1, 3)), [spec(4, 3)]) == [Box((0, 0), (4, 3))]
    flat = Take(Region((4, 3), Box((0, 0), (2, 3))), (6,))
    assert flat.pull(Box((0,), (1,)), [spec(4, 3)]) == [Box((0, 0), (4, 3))]


def test_a_chain_that_begins_with_a_take_needs_no_more_than_that() -> None:
    chain = Chain((Take(Region((8, 3), Box((4, 0), (6, 3))), (2, 3)), Transpose((1, 0))))
    assert chain.pull(Box((0, 1), (3, 2)), [spec(8, 3)]) == [Box((5, 0), (6, 3))]
