"""After the bytes: post-processing in its order, derived buffers, and nothing left without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensorferry.errors import FinalizeError
from tensorferry.modules.describe import describe
from tensorferry.modules.finalize import Completion, derive_buffers, refuse_unfilled


class Logged(nn.Module):
    """Writes its label down when it is post-processed."""

    def __init__(self, log: list[str], label: str, *, parameter: bool = True, **children: nn.Module) -> None:
        super().__init__()
        self.log, self.label = log, label
        if parameter:
            self.w = nn.Parameter(torch.zeros(2))
        for name, child in children.items():
            self.add_module(name, child)

    def process_weights_after_loading(self) -> None:
        self.log.append(self.label)


class Method:
    """A quantization method as engines have them."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.log.append(f"method of {type(layer).__name__}")


def _completion(model: nn.Module) -> Completion:
    target = describe(model)
    return Completion(model, target, {n for n, t in target.items() if t.alias_of is None})


def test_a_module_is_run_as_soon_as_it_is_whole() -> None:
    log: list[str] = []
    completion = _completion(nn.Sequential(Logged(log, "a", lin=nn.Linear(2, 2)), Logged(log, "b")))
    for name in ("1.w", "0.w", "0.lin.weight"):
        completion.ready(name)
    assert log == ["b"]
    completion.ready("0.lin.bias")
    assert log == ["b", "a"]
    completion.finish()
    assert log == ["b", "a"]
    assert completion.processed == ("1", "0")


def test_children_come_before_their_parents() -> None:
    log: list[str] = []
    completion = _completion(Logged(log, "root", mid=Logged(log, "mid", leaf=Logged(log, "leaf"))))
    for name in ("w", "mid.w", "mid.leaf.w"):
        completion.ready(name)
    assert log == ["leaf", "mid", "root"]
    assert completion.processed == ("mid.leaf", "mid", "")


def test_a_child_without_parameters_comes_before_its_parent_too() -> None:
    log: list[str] = []
    completion = _completion(Logged(log, "root", act=Logged(log, "act", parameter=False)))
    completion.ready("w")
    assert log == ["act", "root"]


def test_modules_that_wait_for_nothing_are_run_at_the_end() -> None:
    log: list[str] = []
    completion = _completion(nn.Sequential(Logged(log, "a", parameter=False), Logged(log, "b")))
    completion.ready("1.w")
    assert log == ["b"]
    completion.finish()
    assert log == ["b", "a"]


def test_a_module_in_two_places_is_run_once() -> None:
    log: list[str] = []
    shared = Logged(log, "shared")
    completion = _completion(nn.Sequential(Logged(log, "a", inner=shared), Logged(log, "b", inner=shared)))
    for name in ("1.w", "0.inner.w", "0.w"):
        completion.ready(name)
    completion.finish()
    assert log == ["shared", "b", "a"]


def test_a_tied_tensor_is_waited_for_under_the_name_of_its_owner() -> None:
    log: list[str] = []
    first, second = Logged(log, "a"), Logged(log, "b")
    second.w = first.w
    completion = _completion(nn.Sequential(first, second))
    completion.ready("0.w")
    assert log == ["a", "b"]


def test_tensors_that_nothing_will_bring_are_not_waited_for() -> None:
    log: list[str] = []
    model = Logged(log, "a", lin=nn.Linear(2, 2))
    completion = Completion(model, describe(model), {"w"})
    completion.ready("w")
    assert log == ["a"]


def test_the_quantization_method_comes_after_the_module_itself() -> None:
    log: list[str] = []
    model: Any = Logged(log, "own")
    model.quant_method = Method(log)
    plain: Any = nn.Linear(2, 2)
    plain.quant_method = Method(log)
    named: Any = nn.Linear(2, 2)
    named.quant_method = "fp8"
    _completion(nn.Sequential(model, plain, named)).finish()
    assert log == ["own", "method of Logged", "method of Linear"]


def test_modules_that_were_run_before_are_not_run_again() -> None:
    log: list[str] = []
    model = nn.Sequential(Logged(log, "a"), Logged(log, "b"))
    completion = Completion(model, describe(model), set(), done=("0",))
    completion.finish()
    assert log == ["b"]
    assert completion.processed == ("0", "1")


def test_an_error_says_in_which_module_it_was() -> None:
    class Fails(nn.Module):
        def process_weights_after_loading(self) -> None:
            raise RuntimeError("cannot repack")

    with pytest.raises(RuntimeError, match="cannot repack") as caught:
        _completion(nn.Sequential(nn.ReLU(), Fails())).finish()
    assert caught.value.__notes__ == ["while post-processing the module '1' after loading its weights"]


class Replaces(nn.Module):
    """Puts another parameter in the place of its own, as quantization does."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        vars(self.w).update(attributes)
        self.new: dict[str, Any] = {}

    def process_weights_after_loading(self) -> None:
        self.w = nn.Parameter(self.w.data.to(torch.int8), requires_grad=False)
        vars(self.w).update(self.new)


def test_what_was_set_on_a_parameter_is_carried_over_to_the_one_that_takes_its_place() -> None:
    model = Replaces({"weight_loader": "loader", "group": 32})
    model.new = {"group": 64}
    _completion(model).finish()
    assert model.w.dtype == torch.int8
    assert vars(model.w) == {"weight_loader": "loader", "group": 64}


def test_attributes_that_a_module_takes_off_its_parameter_stay_off() -> None:
    class Cleans(Replaces):
        def process_weights_after_loading(self) -> None:
            vars(self.w).clear()

    model = Cleans({"weight_loader": "loader"})
    _completion(model).finish()
    assert vars(model.w) == {}


def test_tensors_that_a_module_makes_come_to_where_it_is() -> None:
    class Adds(Logged):
        def process_weights_after_loading(self) -> None:
            self.scale = nn.Parameter(torch.ones(2))

    model = Adds([], "a")
    with torch.device("meta"):
        _completion(model).finish()
    assert model.scale.device.type == "cpu"


class Rotary(nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def derive_buffers(self, device: torch.device) -> None:
        self.table = torch.tensor([1.0, 0.01], device=device)


def test_modules_compute_their_own_buffers_where_those_are_on_meta() -> None:
    with torch.device("meta"):
        rotary = Rotary()
    model = nn.Sequential(rotary, nn.Linear(2, 2))
    assert derive_buffers(model, torch.device("cpu")) == ["0.table"]
    assert rotary.table.tolist() == [1, torch.tensor(0.01).item()]


def test_buffers_with_values_are_left_alone() -> None:
    rotary = Rotary()
    rotary.table.fill_(9)
    assert derive_buffers(nn.Sequential(rotary), torch.device("cpu")) == []
    assert rotary.table.tolist() == [9, 9]


def test_a_module_that_does_not_say_how_its_buffer_is_computed_is_named() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(2, device="meta"), persistent=False)
    with pytest.raises(FinalizeError, match=r"non-persistent buffers 0\.mask, .*derive_buffers\(device\)"):
        derive_buffers(nn.Sequential(model), torch.device("cpu"))


def test_whatever_is_left_on_meta_is_refused_by_name_with_layers_folded() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    with pytest.raises(FinalizeError, match=r"nothing filled \{0\.\.2\}\.weight: .* does not hold them"):
        refuse_unfilled(model, {})


def test_memory_that_got_no_values_is_refused_by_name() -> None:
    with pytest.raises(FinalizeError, match="nothing filled qkv"):
        refuse_unfilled(nn.Linear(2, 2), {"qkv": "missing in part"})
    refuse_unfilled(nn.Linear(2, 2), {})
