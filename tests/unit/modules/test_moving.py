"""Tensors move to other memory where nothing but they themselves uses what they have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensorferry.modules.describe import describe
from tensorferry.modules.moving import movable, move, realigned


def names(model: nn.Module) -> set[str]:
    return set(movable(model, describe(model)))


def test_parameters_and_buffers_of_the_cpu_can_move() -> None:
    model = nn.BatchNorm1d(8)
    assert names(model) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def test_a_tied_parameter_moves_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert names(model) == {"0.weight"}


@pytest.mark.parametrize(
    "use",
    [lambda t: t.detach(), lambda t: t.data[1:], lambda t: t.view(-1), lambda t: t.numpy(force=True)],
)  # fmt: skip
def test_what_somebody_else_uses_stays(use: object) -> None:
    model = nn.Linear(4, 4)
    kept = use(model.weight)  # type: ignore[operator]
    assert names(model) == {"bias"}
    del kept
    assert names(model) == {"weight", "bias"}


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(4, 4, device="meta"), torch.zeros(4, 8)[:, :4], torch.zeros(8)[4:], torch.zeros(4, 4).t()[:, :3],
     torch.empty(0), torch.zeros(1).expand(4)],
)  # fmt: skip
def test_what_does_not_lie_as_in_a_file_stays(tensor: torch.Tensor) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(tensor)
    assert names(model) == set()


def test_two_parameters_over_one_memory_stay() -> None:
    model, memory = nn.Module(), torch.zeros(8)
    model.a, model.b = nn.Parameter(memory), nn.Parameter(memory.detach())
    del memory
    assert names(model) == set()


def test_what_moves_is_the_same_object_with_other_values() -> None:
    model = nn.Linear(4, 4)
    weight, memory = model.weight, torch.ones(4, 4)
    weight.note = "kept"  # type: ignore[attr-defined]
    move(weight, memory)
    assert model.weight is weight
    assert weight.data_ptr() == memory.data_ptr()
    assert weight.requires_grad
    assert weight.note == "kept"  # type: ignore[attr-defined]
    assert bool((weight == 1).all())


def test_what_lies_on_odd_addresses_is_copied_unless_others_use_it() -> None:
    model = nn.Linear(4, 4)
    odd = {parameter.data_ptr() for parameter in model.parameters()}
    view = model.bias.detach()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    realigned(model, lambda address: address in odd)
    assert model.weight.data_ptr() not in odd
    assert model.bias.data_ptr() == view.data_ptr()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
