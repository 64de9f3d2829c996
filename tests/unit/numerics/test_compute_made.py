"""What transforms of several inputs compute: factors, tensors made first, and parts put together."""

from __future__ import annotations

import pytest
import torch

from tensorferry.core.boxes import Box, Region
from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.core.making import Assemble, Each, Scale
from tensorferry.core.transforms import Chain, Concat, Dequantize, TensorSpec, Transform, Transpose
from tensorferry.numerics import compute as computing
from tensorferry.numerics.compute import compute, compute_into, compute_whole
from tensorferry.numerics.dequantize import dequantize

F32, Q8 = DTYPES["F32"], DTYPES["Q8_0"]


def spec(*shape: int, dtype: DType = F32) -> TensorSpec:
    return TensorSpec(dtype, shape)


def packed(*shape: int) -> torch.Tensor:
    """Return Q8_0 blocks with the scale 0.1 and codes that count."""
    blocks = torch.arange(shape[0] * shape[1] // 32 * 34).remainder(251).to(torch.uint8).view(-1, 34)
    blocks[:, :2] = torch.tensor([0x66, 0x2E], dtype=torch.uint8)
    return blocks.view(shape[0], -1)


def test_factors_are_multiplied_in_in_float32() -> None:
    blocks, factor = packed(2, 64), torch.tensor([0.3])
    expected = dequantize(Q8, blocks) * 0.3
    assert torch.equal(compute_whole(Scale(), [blocks, factor], [spec(2, 64, dtype=Q8), spec(1)]), expected)


def test_half_precision_numbers_and_factors_are_multiplied_in_float32_too() -> None:
    numbers, factor = torch.tensor([1.5, 3.0]).half(), torch.tensor(0.1).half()
    specs = [spec(2, dtype=DTYPES["F16"]), spec(dtype=DTYPES["F16"])]
    made = compute_whole(Scale(), [numbers, factor], specs)
    assert made.tolist() == (numbers.float() * factor.float()).tolist()


def test_each_index_of_the_first_dimension_has_its_factor() -> None:
    numbers, factors = torch.ones(3, 2, 2), torch.tensor([1.0, 2.0, 3.0])
    part = Box((1, 0, 0), (3, 1, 2))
    made = compute(Scale(), [numbers[1:, :1], factors[1:]], [spec(3, 2, 2), spec(3)], part)
    assert made.tolist() == [[[2, 2]], [[3, 3]]]


@pytest.mark.parametrize("shape", [(7, 64), (3, 5, 64), (1, 5, 64)])
@pytest.mark.parametrize("each", [True, False])
def test_products_go_where_they_belong_some_rows_at_a_time(
    shape: tuple[int, ...], each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "_AT_ONCE", 128)
    numbers = torch.arange(float(torch.Size(shape).numel())).view(shape)
    factors = torch.arange(1.0, shape[0] + 1) if each else torch.tensor([2.0])
    into, whole = torch.empty(shape, dtype=torch.bfloat16), Box.whole(shape)
    compute_into(Scale(), [numbers, factors], [spec(*shape), spec(*factors.shape)], whole, into)
    expected = numbers * factors.view(-1, *(1 for _ in shape[1:]))
    assert torch.equal(into, expected.bfloat16())


def test_each_tensor_is_made_and_then_one_of_all() -> None:
    blocks, more = packed(2, 64), torch.ones(1, 64)
    via = Each(((1, Dequantize()), (1, None)), Chain((Concat(0), Transpose((1, 0)))))
    made = compute_whole(via, [blocks, more], [spec(2, 64, dtype=Q8), spec(1, 64)])
    assert torch.equal(made, torch.cat([dequantize(Q8, blocks), more]).T)


def test_of_a_part_only_what_it_needs_is_made() -> None:
    blocks, more = packed(2, 64), torch.ones(1, 64)
    via, specs = Each(((1, Dequantize()), (1, None)), Concat(0)), [spec(2, 64, dtype=Q8), spec(1, 64)]
    out = Box((2, 0), (3, 64))
    first, second = via.pull(out, specs)
    parts = [blocks[first.start[0] : first.stop[0]], more[second.slices]]
    assert parts[0].numel() == 0
    assert torch.equal(compute(via, parts, specs, out), more)


def pieces() -> Transform:
    evens, odds = (Region((3, 2), Box((0, n), (3, n + 1))) for n in (0, 1))
    middle = Region((5,), Box((1,), (4,)))
    return Assemble(spec(6), ((middle, evens), (Region.whole((3,)), odds)))


def test_parts_are_put_where_they_belong() -> None:
    inputs = [torch.arange(5.0), torch.tensor([10.0, 20.0, 30.0])]
    specs = [spec(5), spec(3)]
    assert compute_whole(pieces(), inputs, specs).tolist() == [1, 10, 2, 20, 3, 30]
    assert compute(pieces(), [inputs[0][1:4], inputs[1]], specs, Box((1,), (3,))).tolist() == [10, 2]
