"""Bytes seen as tensors, tensors seen as bytes, and what of it copies."""

from __future__ import annotations

import pytest
import torch

from tensorferry.core.boxes import Box, Region
from tensorferry.core.dtypes import DTYPES
from tensorferry.numerics.memory import bytes_of, strided_view, view_region


def _staged(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(torch.uint8)


def test_the_bytes_of_a_tensor_are_its_memory() -> None:
    tensor = torch.zeros(2, dtype=torch.int16)
    view = bytes_of(tensor)
    view[:] = bytes([1, 0, 0, 1])
    assert tensor.tolist() == [1, 256]
    assert (view.format, view.ndim, view.readonly) == ("B", 1, False)


def test_a_tensor_without_elements_has_no_bytes() -> None:
    assert len(bytes_of(torch.empty(0, 3))) == 0


def test_staged_bytes_are_seen_and_not_copied() -> None:
    staged = _staged(0, 1, 2, 3, 4, 5)
    seen = strided_view(staged, 4, DTYPES["F32"], (2, 2), (2, 1))
    assert seen.tolist() == [[1, 2], [3, 4]]
    staged.view(torch.float32)[1] = 9
    assert seen[0, 0] == 9


def test_strides_follow_the_bytes() -> None:
    assert strided_view(_staged(0, 1, 2, 3, 4, 5), 0, DTYPES["F32"], (3, 2), (1, 3)).tolist() == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]
    assert strided_view(_staged(7), 0, DTYPES["F32"], (3,), (0,)).tolist() == [7, 7, 7]


def test_bytes_on_an_odd_address_are_copied_to_an_even_one() -> None:
    staged = torch.cat([torch.zeros(3, dtype=torch.uint8), _staged(1, 2)])
    assert strided_view(staged, 3, DTYPES["F32"], (2,), (1,)).tolist() == [1, 2]


def test_scalars_and_nothing_at_all() -> None:
    assert strided_view(_staged(5), 0, DTYPES["F32"], (), ()).shape == ()
    assert strided_view(_staged(), 0, DTYPES["F32"], (0, 3), (3, 1)).shape == (0, 3)


def test_a_packed_type_without_torch_dtype_is_bytes_along_the_last_dimension() -> None:
    staged = torch.arange(12, dtype=torch.uint8)
    assert strided_view(staged, 0, DTYPES["F6_E2M3"], (2, 2), (2, 1)).tolist() == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
    ]


def test_a_region_is_a_view_that_can_be_written_to() -> None:
    parameter = torch.zeros(2, 6)
    view_region(parameter, Region((2, 3, 2), Box((0, 1, 0), (2, 2, 2)))).fill_(1)
    assert parameter.tolist() == [[0, 0, 1, 1, 0, 0]] * 2


def test_a_reshape_that_is_no_view_of_a_strided_tensor_is_refused() -> None:
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        view_region(torch.zeros(2, 3).t(), Region((6,), Box((0,), (2,))))
