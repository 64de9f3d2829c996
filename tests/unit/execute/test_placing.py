"""From staged bytes into parameters: which part, in which shape, and when a read can go there directly."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import ar
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.core.schedule import Input, Piece, Task
from tensorferry.core.transforms import Add, TensorSpec
from tensorferry.execute.placing import in_place, interval_boxes, perform, region_of, write
from tensorferry.numerics.casts import Loss

F32 = DTYPES["F32"]


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.data())
def test_an_interval_of_positions_is_cut_into_boxes_that_hold_just_those(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = prod(shape)
    first = data.draw(st.integers(0, size))
    last = data.draw(st.integers(first, size))
    positions = torch.arange(size).reshape(shape)
    found: list[int] = []
    for box, begin in interval_boxes(shape, first, last):
        assert begin == len(found)
        found += positions[box.slices].reshape(-1).tolist()
    assert found == list(range(first, last))


def test_a_box_lands_where_it_was() -> None:
    into = torch.zeros(2, 3)
    write(into, ar(1, 2, start=7), Box((1, 1), (2, 3)), Region.whole((2, 3)))
    assert into.tolist() == [[0, 0, 0], [0, 7, 8]]


def test_a_box_of_a_region_is_counted_from_where_the_region_begins() -> None:
    into = torch.zeros(2, 2)
    write(into, ar(1, 2, start=7), Box((3, 4), (4, 6)), Region((9, 9), Box((2, 4), (4, 6))))
    assert into.tolist() == [[0, 0], [7, 8]]


@pytest.mark.parametrize("shape", [(6,), (3, 2), (1, 6), (6, 1, 1), (2, 1, 3)])
def test_a_parameter_of_another_shape_gets_the_same_order(shape: tuple[int, ...]) -> None:
    into = torch.zeros(shape)
    write(into, ar(2, 3), Box.whole((2, 3)), Region.whole((2, 3)))
    assert into.reshape(-1).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 1)])
@pytest.mark.parametrize("box", [Box((1, 0), (2, 2)), Box((0, 1), (2, 2)), Box((1, 1), (2, 2))])
def test_a_single_row_or_column_lands_in_a_part_that_has_other_ones_and_lies_scattered(
    shape: tuple[int, ...], box: Box
) -> None:
    into = torch.zeros(*shape, 3)[..., 1]
    write(into, torch.ones(box.shape), box, Region.whole((2, 2)))
    expected = torch.zeros(2, 2)
    expected[box.slices] = 1
    assert torch.equal(into.reshape(2, 2), expected)


def test_a_column_block_reaches_a_flat_parameter_row_by_row() -> None:
    into = torch.zeros(6)
    write(into, torch.tensor([[1.0], [2.0]]), Box((0, 1), (2, 2)), Region.whole((2, 3)))
    assert into.tolist() == [0, 1, 0, 0, 2, 0]


def test_scalars_meet_vectors_of_one() -> None:
    into = torch.zeros(1)
    write(into, torch.tensor(2.5), Box((), ()), Region.whole(()))
    assert into.tolist() == [2.5]
    scalar = torch.zeros(())
    write(scalar, torch.tensor([3.5]), Box((0,), (1,)), Region.whole((1,)))
    assert scalar.item() == 3.5


def test_strided_parameters_of_another_shape_are_written_in_order() -> None:
    into = torch.zeros(3, 2).t()
    write(into, ar(6), Box.whole((6,)), Region.whole((6,)))
    assert into.tolist() == [[0, 1, 2], [3, 4, 5]]
    thin = torch.zeros(3, 1, 2).transpose(0, 2)
    write(thin, ar(2, 3), Box.whole((2, 3)), Region.whole((2, 3)))
    assert thin.squeeze().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_region_of_a_parameter_is_a_view() -> None:
    parameter = torch.zeros(2, 2)
    region_of(parameter, Region((4,), Box((1,), (3,))), F32).fill_(1)
    assert parameter.tolist() == [[0, 1], [1, 0]]


def _task(
    parameter: TensorSpec, into: Region, source: Region, *, dtype: str = "F32", box: Box | None = None
) -> tuple[Plan, Task]:
    """Return a plan of one copy of an entry of the source's view, and the task that does it from one read."""
    entry = TensorEntry.at("e", DTYPES[dtype], source.view, "f", 0)
    plan = Plan((Step("p", into, (Source(entry, source),)),), {"p": parameter})
    box = box or source.box
    strides = [1]
    for n in reversed(box.shape[1:]):
        strides.append(strides[-1] * n)
    piece = Piece(0, 0, tuple(reversed(strides[: len(box.shape)])), box)
    return plan, Task(0, None, (Input(0, box, (piece,)),))


def test_a_whole_parameter_can_be_read_in_place() -> None:
    plan, task = _task(TensorSpec(F32, (2, 3)), Region.whole((2, 3)), Region.whole((2, 3)))
    parameter = torch.zeros(2, 3)
    into = in_place(plan, task, parameter)
    assert into is not None
    assert (into.data_ptr(), into.numel()) == (parameter.data_ptr(), 6)


def test_rows_can_be_read_in_place_and_columns_cannot() -> None:
    rows = Region((4, 3), Box((2, 0), (4, 3)))
    plan, task = _task(TensorSpec(F32, (5, 3)), Region((5, 3), Box((1, 0), (3, 3))), rows)
    parameter = torch.zeros(5, 3)
    into = in_place(plan, task, parameter)
    assert into is not None
    assert into.data_ptr() == parameter[1].data_ptr()
    columns = Region((4, 3), Box((0, 1), (4, 3)))
    plan, task = _task(TensorSpec(F32, (4, 5)), Region((4, 5), Box((0, 1), (4, 3))), columns)
    assert in_place(plan, task, torch.zeros(4, 5)) is None


def test_part_of_a_task_is_read_to_its_own_place() -> None:
    plan, task = _task(TensorSpec(F32, (4, 3)), Region.whole((4, 3)), Region.whole((4, 3)), box=Box((2, 0), (3, 3)))
    parameter = torch.zeros(4, 3)
    into = in_place(plan, task, parameter)
    assert into is not None
    assert (into.data_ptr(), into.numel()) == (parameter[2].data_ptr(), 3)


def test_another_type_a_stride_or_a_transform_is_not_read_in_place() -> None:
    plan, task = _task(TensorSpec(F32, (2, 3)), Region.whole((2, 3)), Region.whole((2, 3)), dtype="BF16")
    assert in_place(plan, task, torch.zeros(2, 3)) is None
    plan, task = _task(TensorSpec(F32, (2, 3)), Region.whole((2, 3)), Region.whole((2, 3)))
    assert in_place(plan, task, torch.zeros(3, 2).t()) is None
    (step,) = plan.steps
    through = Plan((step._replace(via=Add(1), window=step.into),), plan.parameters)
    assert in_place(through, task, torch.zeros(2, 3)) is None


def test_a_parameter_that_is_not_on_the_cpu_is_not_read_in_place() -> None:
    plan, task = _task(TensorSpec(F32, (2, 3)), Region.whole((2, 3)), Region.whole((2, 3)))
    assert in_place(plan, task, torch.zeros(2, 3, device="meta")) is None


def test_a_task_is_performed_from_staged_bytes() -> None:
    plan, task = _task(TensorSpec(DTYPES["F16"], (2, 2)), Region.whole((2, 2)), Region.whole((2, 2)))
    parameter = torch.zeros(2, 2, dtype=torch.float16)
    staged = torch.tensor([1, 2, 3, 1e6]).view(torch.uint8)
    assert perform(plan, task, [staged], parameter) == Loss(overflow=1)
    assert parameter.tolist() == [[1, 2], [3, float("inf")]]


def test_a_task_without_inputs_fills() -> None:
    plan = Plan((Step("p", Region((4,), Box((2,), (4,))), (), fill=3.0),), {"p": TensorSpec(F32, (2, 2))})
    parameter = torch.zeros(2, 2)
    perform(plan, Task(0, None, ()), [], parameter)
    assert parameter.tolist() == [[0, 0], [3, 3]]
