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
from tensorferry.numerics.compute import compute
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
