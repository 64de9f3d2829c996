"""Copying into another type: the values, what they lose, and the modes in which a tensor may be written to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tensorferry.numerics.casts import Loss, copy_counting, fill

T = getattr


def _cast(values: Sequence[Any], source: str, target: str) -> tuple[torch.Tensor, Loss]:
    into = torch.empty(len(values), dtype=T(torch, target))
    return into, copy_counting(into, torch.tensor(values, dtype=T(torch, source)))


def test_what_a_narrower_float_cannot_hold_is_counted() -> None:
    into, loss = _cast([1.0, 1e5, -1e30, 1e-30], "bfloat16", "float16")
    assert into.tolist() == [1, float("inf"), float("-inf"), 0]
    assert loss == Loss(overflow=2, underflow=1)
    assert str(loss) == "2 overflow, 1 underflow"


def test_rounding_is_no_loss_and_values_are_rounded_once() -> None:
    into, loss = _cast([1 + 2**-9, 1 + 3 * 2**-9], "float32", "bfloat16")
    assert into.tolist() == [1, 1 + 2**-7]
    assert loss == Loss()


def test_infinities_and_nan_of_the_file_are_not_counted() -> None:
    into, loss = _cast([float("inf"), float("nan"), 0.0], "float32", "float16")
    assert into[0] == float("inf")
    assert into[1].isnan()
    assert loss == Loss()


@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e4m3fnuz"])
def test_a_type_without_infinity_saturates_and_that_is_an_overflow(target: str) -> None:
    most = torch.finfo(T(torch, target)).max
    _, loss = _cast([most, most * 1.01, most * 2, -most * 100, 1e-9], "float32", target)
    assert loss == Loss(overflow=2, underflow=1)


def test_infinities_that_the_type_cannot_hold_are_an_overflow() -> None:
    _, loss = _cast([float("inf"), float("-inf"), float("nan"), 1.0], "bfloat16", "float8_e4m3fn")
    assert loss == Loss(overflow=2)


def test_the_largest_half_takes_what_rounds_to_it() -> None:
    into, loss = _cast([65504.0, 65519.0, 65521.0], "float32", "float16")
    assert into.tolist() == [65504, 65504, float("inf")]
    assert loss == Loss(overflow=1)


@pytest.mark.parametrize(
    ("values", "source", "target", "overflow"),
    [
        ([-1, 5], "int8", "uint8", 1),
        ([200, 5], "uint8", "int8", 1),
        ([-1, 5], "int64", "uint64", 1),
        ([2**64 - 1, 5], "uint64", "int64", 1),
        ([2**32 - 1, 5], "uint32", "int32", 1),
        ([300, 255], "int16", "uint8", 1),
        ([70000, -70000, 7], "int64", "int16", 2),
        ([127, 0], "uint16", "int8", 0),
    ],
)
def test_integers_that_wrap_around_are_counted(values: list[int], source: str, target: str, overflow: int) -> None:
    assert _cast(values, source, target)[1] == Loss(overflow=overflow)


def test_complex_numbers_lose_by_their_components() -> None:
    into, loss = _cast([1e300 + 1j, 1 + 1e-300j, 2 + 3j], "complex128", "complex64")
    assert into[2] == 2 + 3j
    assert loss == Loss(overflow=1, underflow=1)


def test_a_double_beyond_float32_is_counted() -> None:
    assert _cast([1e300, 1e-300, 1.0], "float64", "float32")[1] == Loss(overflow=1, underflow=1)


def test_large_and_strided_tensors_are_counted_whole() -> None:
    values = torch.full((700, 3, 500), 1e6).transpose(0, 2)
    values[7, 1, 9] = 1.0
    into = torch.empty(700, 3, 500, dtype=torch.float16).transpose(0, 2)
    assert copy_counting(into, values) == Loss(overflow=700 * 3 * 500 - 1)


def test_nothing_is_counted_for_tensors_without_elements() -> None:
    assert _cast([], "float32", "float16")[1] == Loss()


@pytest.mark.parametrize("write", [lambda into: copy_counting(into, torch.ones(2)), lambda into: fill(into, 1.0)])
class TestModes:
    """What may be written to, whatever mode the writing thread is in."""

    def test_a_leaf_that_requires_a_gradient(self, write: Any) -> None:
        leaf = nn.Parameter(torch.zeros(4))
        write(leaf[1:3])
        assert leaf.tolist() == [0, 1, 1, 0]
        assert leaf.grad_fn is None

    def test_a_tensor_made_in_inference_mode_outside_of_it(self, write: Any) -> None:
        with torch.inference_mode():
            made = torch.zeros(4)
        write(made[1:3])
        assert made.tolist() == [0, 1, 1, 0]

    def test_an_ordinary_tensor_within_inference_mode_stays_ordinary(self, write: Any) -> None:
        leaf = nn.Parameter(torch.zeros(2))
        with torch.inference_mode():
            write(leaf.detach())
        (gradient,) = torch.autograd.grad(leaf.sum(), leaf)
        assert (leaf.tolist(), gradient.tolist()) == ([1, 1], [1, 1])

    def test_another_thread_which_has_modes_of_its_own(self, write: Any) -> None:
        with torch.inference_mode():
            made = nn.Parameter(torch.zeros(2))
            thread = threading.Thread(target=write, args=(made,))
            thread.start()
            thread.join()
        assert made.tolist() == [1, 1]


def test_values_that_require_a_gradient_leave_no_graph_behind() -> None:
    into = torch.zeros(2)
    copy_counting(into, torch.ones(2, requires_grad=True))
    assert not into.requires_grad


NAMES = [
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128", "float4_e2m1fn_x2",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_type_can_be_filled_with_zeros(name: str) -> None:
    into = torch.full((3 * 16,), 0xFF, dtype=torch.uint8).view(T(torch, name))
    fill(into, None)
    assert into.view(torch.uint8).tolist() == [0] * 48


def test_filling_takes_a_value() -> None:
    into = torch.zeros(2, dtype=torch.bfloat16)
    fill(into, -1.5)
    assert into.tolist() == [-1.5, -1.5]


def test_a_packed_type_refuses_a_value_that_torch_cannot_fill_in() -> None:
    with pytest.raises(NotImplementedError):
        fill(torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), 1.0)
