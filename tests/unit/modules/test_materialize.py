"""Tensors get memory when they are looked up: in every place, with class and attributes, and no sooner."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tensorferry.core.target import Slot, Target
from tensorferry.modules.describe import describe
from tensorferry.modules.materialize import Materialized


def _on_meta(build: type[nn.Module], *args: object, **more: object) -> Any:  # any class of module
    with torch.device("meta"):
        return build(*args, **more)


def _looked_up(model: nn.Module, target: Target | None = None) -> Materialized:
    found = Materialized(model, describe(model) if target is None else target)
    for name in list(found):
        found[name].zero_()
    return found


class Weight(nn.Parameter):
    """A parameter as engines have them: of a class of its own, with a loader on it."""

    weight_loader: object


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def _untied(target: Target) -> Target:
    head = target["head.weight"]
    return {**target, "head.weight": replace(head, alias_of=None, slots={"": Slot.whole(head.shape)})}


def test_nothing_has_memory_before_it_is_looked_up() -> None:
    model = _on_meta(nn.Linear, 2, 3)
    found = Materialized(model, describe(model))
    assert (list(found), len(found), found.touched) == (["weight", "bias"], 2, False)
    assert found["weight"].device.type == "cpu"
    assert model.bias.is_meta
    assert found.touched
    assert found.given_memory == {"weight"}


def test_what_comes_back_is_the_parameter_and_needs_no_gradient() -> None:
    model = _on_meta(nn.Linear, 2, 3)
    found = Materialized(model, describe(model))
    found["weight"].fill_(5)
    assert found["weight"] is found["weight"]
    assert not found["weight"].requires_grad
    assert model.weight.tolist() == [[5, 5]] * 3
    assert model.weight.requires_grad


def test_tensors_with_memory_stay_the_objects_that_they_are() -> None:
    model = nn.Linear(2, 3)
    weight, pointer = model.weight, model.weight.data_ptr()
    found = _looked_up(model)
    assert model.weight is weight
    assert weight.data_ptr() == pointer
    assert found.given_memory == set()
    assert not model.weight.any()


def test_a_model_may_be_on_meta_in_part() -> None:
    model = nn.Sequential(nn.Linear(2, 2), _on_meta(nn.Linear, 2, 2))
    assert _looked_up(model).given_memory == {"1.weight", "1.bias"}
    assert not any(p.is_meta for p in model.parameters())


def test_class_attributes_and_requires_grad_survive() -> None:
    model = _on_meta(nn.Linear, 2, 3)
    model.weight = Weight(model.weight.data, requires_grad=False)
    model.weight.weight_loader = loader = object()
    _looked_up(model)
    assert type(model.weight) is Weight
    assert model.weight.weight_loader is loader
    assert not model.weight.requires_grad
    assert type(model.bias) is nn.Parameter
    assert model.bias.requires_grad


def test_attributes_of_buffers_survive() -> None:
    model: Any = nn.Module()
    model.register_buffer("scale", torch.zeros(2, device="meta"))
    model.scale.weight_loader = loader = object()
    _looked_up(model)
    assert model.scale.weight_loader is loader
    assert not isinstance(model.scale, nn.Parameter)


def test_strides_survive() -> None:
    model = _on_meta(nn.Conv2d, 2, 3, 3).to(memory_format=torch.channels_last)
    _looked_up(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_tied_tensor_stays_one_object_in_every_place() -> None:
    model = _on_meta(Tied)
    found = _looked_up(model)
    assert model.head.weight is model.embed.weight
    assert list(found) == ["embed.weight"]


def test_a_tie_that_the_target_adds_is_made() -> None:
    model = _on_meta(Tied)
    with torch.device("meta"):
        model.head.weight = nn.Parameter(torch.empty(3, 2))
    target = describe(model)
    tied = {**target, "head.weight": replace(target["head.weight"], alias_of="embed.weight", slots={})}
    _looked_up(model, tied)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tie_that_the_target_takes_apart_is_taken_apart(device: str) -> None:
    with torch.device(device):
        model = Tied()
    found = Materialized(model, _untied(describe(model)))
    found["embed.weight"].fill_(1)
    found["head.weight"].fill_(2)
    assert model.embed.weight.tolist() == [[1, 1]] * 3
    assert model.head.weight.tolist() == [[2, 2]] * 3


def test_parameters_over_one_piece_of_memory_are_taken_apart_too() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    found = Materialized(model, _untied(describe(model)))
    found["embed.weight"].fill_(1)
    found["head.weight"].fill_(2)
    assert model.embed.weight.tolist() == [[1, 1]] * 3
    assert found.given_memory == {"head.weight"}


def test_parameters_over_one_piece_of_memory_that_stay_tied_stay_the_objects_that_they_are() -> None:
    model = Tied()
    model.head.weight = other = Weight(model.embed.weight.data)
    _looked_up(model)
    assert model.head.weight is other
    assert not other.any()


def test_a_module_in_two_places_is_filled_in_both() -> None:
    shared = _on_meta(nn.Linear, 2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared))
    _looked_up(model)
    assert not shared.weight.is_meta


def test_what_modules_keep_besides_their_parameters_is_replaced_as_well() -> None:
    model = _on_meta(nn.LSTM, 3, 4)
    model.shortcut = [model.weight_ih_l0]
    model.table = {"bias": model.bias_ih_l0}
    model.register_buffer("scale", torch.ones(2, device="meta"))
    model.scale_too = model.scale
    _looked_up(model)
    assert model.shortcut[0] is model.weight_ih_l0
    assert model.table["bias"] is model.bias_ih_l0
    assert model.scale_too is model.scale
    assert not any(w.is_meta for w in model._flat_weights)


def test_memory_comes_from_the_device_that_is_asked_for() -> None:
    model = _on_meta(nn.Linear, 2, 2)
    assert Materialized(model, describe(model), "cpu")["weight"].device.type == "cpu"


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_parameters_made_in_inference_mode_can_still_be_trained(mode: type[torch.inference_mode]) -> None:
    model = _on_meta(nn.Linear, 2, 2)
    with mode():
        _looked_up(model)
    assert not model.weight.is_inference()
    assert model(torch.ones(1, 2)).requires_grad


def test_several_threads_get_one_tensor() -> None:
    model = _on_meta(nn.Linear, 512, 512)
    found = Materialized(model, describe(model))
    together = threading.Barrier(8)

    def look_up(_: int) -> int:
        together.wait(60)
        return found["weight"].data_ptr()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(look_up, range(8)))) == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_that_was_released_is_freed_when_the_model_lets_go_of_it(device: str) -> None:
    with torch.device(device):
        model: Any = nn.Linear(2, 2)
    found = Materialized(model, describe(model))
    found["weight"].zero_()
    seen = weakref.ref(model.weight)
    found.release("weight")
    model.weight = None
    gc.collect()
    assert seen() is None
    assert (len(found), found.touched) == (2, True)
    with pytest.raises(KeyError):
        found["weight"]


def test_names_that_are_not_there_are_key_errors() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(KeyError):
        Materialized(model, describe(model))["nope"]
