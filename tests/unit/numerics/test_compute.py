"""Each transform, whole and in part, by values worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from helpers.checkpoints import ar
from tensorferry.core.boxes import Box, Region
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.transforms import Add, Chain, Concat, Custom, Stack, Take, TensorSpec, Transform, Transpose
from tensorferry.errors import PlanError
from tensorferry.numerics.casts import Loss
from tensorferry.numerics.compute import compute, compute_into
from tensorferry.numerics.torch_dtypes import dtype_of


def _specs(inputs: Sequence[torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(dtype_of(t.dtype), tuple(t.shape)) for t in inputs]


def _computed(via: Transform, inputs: Sequence[torch.Tensor], out: Box | None = None) -> torch.Tensor:
    """Compute a part of the output from just what the transform says that it needs."""
    specs = _specs(inputs)
    out = out or Box.whole(via.infer(specs).shape)
    parts = [t[box.slices] for t, box in zip(inputs, via.pull(out, specs), strict=True)]
    return compute(via, parts, specs, out)


INPUTS = [ar(2, 3), ar(2, 3, start=10)]
CASES: list[tuple[Transform, list[torch.Tensor], torch.Tensor]] = [
    (Transpose((1, 0)), INPUTS[:1], torch.tensor([[0.0, 3], [1, 4], [2, 5]])),
    (Add(1), INPUTS[:1], torch.tensor([[1.0, 2, 3], [4, 5, 6]])),
    (Stack(0), INPUTS, torch.tensor([[[0.0, 1, 2], [3, 4, 5]], [[10, 11, 12], [13, 14, 15]]])),
    (Stack(2), INPUTS, torch.tensor([[[0.0, 10], [1, 11], [2, 12]], [[3, 13], [4, 14], [5, 15]]])),
    (Concat(0), INPUTS, torch.tensor([[0.0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 14, 15]])),
    (Concat(1), INPUTS, torch.tensor([[0.0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]])),
    (
        Chain((Concat(0), Transpose((1, 0)), Add(1))),
        INPUTS,
        torch.tensor([[1.0, 4, 11, 14], [2, 5, 12, 15], [3, 6, 13, 16]]),
    ),
]


@pytest.mark.parametrize(("via", "inputs", "expected"), CASES)
def test_whole_outputs(via: Transform, inputs: list[torch.Tensor], expected: torch.Tensor) -> None:
    assert torch.equal(_computed(via, inputs), expected)


@pytest.mark.parametrize(("via", "inputs", "expected"), CASES)
def test_every_row_and_every_column_alone(via: Transform, inputs: list[torch.Tensor], expected: torch.Tensor) -> None:
    shape = tuple(expected.shape)
    for dim, extent in enumerate(shape):
        for i in range(extent):
            start, stop = [0] * len(shape), list(shape)
            start[dim], stop[dim] = i, i + 1
            out = Box(tuple(start), tuple(stop))
            assert torch.equal(_computed(via, inputs, out), expected[out.slices])


MORE = [
    *CASES,
    (Chain((Stack(0), Transpose((2, 0, 1)))), INPUTS, torch.stack(INPUTS).permute(2, 0, 1)),
    (Chain((Stack(1), Transpose((1, 2, 0)), Transpose((2, 0, 1)))), INPUTS, torch.stack(INPUTS, 1)),
    (Chain((Concat(1), Transpose((1, 0)))), INPUTS, torch.cat(INPUTS, 1).t()),
    (Chain((Transpose((1, 0)),)), INPUTS[:1], INPUTS[0].t()),
]


@pytest.mark.parametrize(("via", "inputs", "expected"), MORE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("turned", [False, True])
def test_outputs_are_computed_into_what_is_given(
    via: Transform, inputs: list[torch.Tensor], expected: torch.Tensor, dtype: torch.dtype, turned: bool
) -> None:
    """Whole and row by row, into rows and into columns, in the type of the destination."""
    specs, rows = _specs(inputs), tuple(Box.whole(expected.shape).rows(1))
    for out in (Box.whole(expected.shape), *rows):
        parts = [t[box.slices] for t, box in zip(inputs, via.pull(out, specs), strict=True)]
        into = torch.full(out.shape, -1.0, dtype=dtype)
        into = into.mT.contiguous().mT if turned else into
        assert compute_into(via, parts, specs, out, into) == Loss()
        assert torch.equal(into, expected[out.slices].to(dtype))


def test_losses_of_every_part_are_counted() -> None:
    inputs = [torch.tensor([1.0, 1e6]), torch.tensor([1e-12, 1e6])]
    into = torch.zeros(2, 2, dtype=torch.float16)
    assert compute_into(Stack(0), inputs, _specs(inputs), Box.whole((2, 2)), into) == Loss(overflow=2, underflow=1)
    whole = Chain((Stack(0), Transpose((1, 0))))
    assert compute_into(whole, inputs, _specs(inputs), Box.whole((2, 2)), into.t()) == Loss(2, 1)


def test_take_is_a_region_in_another_shape() -> None:
    via = Take(Region((2, 3), Box((0, 1), (2, 3))), (4,))
    assert _computed(via, INPUTS[:1]).tolist() == [1, 2, 4, 5]


def test_small_floats_are_added_to_in_float32_so_that_they_are_rounded_once() -> None:
    made = _computed(Add(1), [torch.tensor([2**-9], dtype=torch.bfloat16)])
    assert made.dtype == torch.float32
    assert made.item() == 1 + 2**-9


def test_custom_functions_see_whole_inputs_and_give_a_part() -> None:
    via = Custom("double", TensorSpec(DTYPES["F32"], (2, 3)), lambda inputs: inputs[0] * 2)
    assert _computed(via, INPUTS[:1], Box((1, 0), (2, 3))).tolist() == [[6, 8, 10]]


def test_a_custom_transform_out_of_json_cannot_compute() -> None:
    via = Custom("double", TensorSpec(DTYPES["F32"], (2, 3)))
    with pytest.raises(PlanError, match="'double' of this plan is not part of its JSON"):
        _computed(via, INPUTS[:1])


def test_an_unknown_transform_is_refused_by_name() -> None:
    class Mystery(Add):
        pass

    assert isinstance(_computed(Mystery(1), INPUTS[:1]), torch.Tensor)

    class Odd:
        op = "odd"

    with pytest.raises(PlanError, match="'odd'"):
        compute(Odd(), INPUTS[:1], _specs(INPUTS[:1]), Box.whole((2, 3)))  # type: ignore[arg-type]
