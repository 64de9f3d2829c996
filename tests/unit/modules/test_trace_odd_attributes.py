"""Loaders and models that hang unusual things on modules: tracing neither stumbles over them nor runs their code."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.old_loaders import load_both_ways
from tensorferry.formats.opening import open_files
from tensorferry.modules.trace import Traced, trace


class Model(nn.Module):
    """Its loader copies `a`, and does `end`; `thing` is what was there before."""

    def __init__(self, end: Callable[[Any], object], thing: Any = None) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(4, 6), requires_grad=False)
        self.sub = nn.Dropout()
        self.end = end
        self.thing = thing

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)
        self.end(self)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "model.safetensors", {"a": ar(4, 6)}).parent


def traced(folder: Path, model: nn.Module) -> Traced:
    with open_files(folder) as opened:
        return trace(model, opened.catalogue)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def chain(length: int) -> Callable[[], Any]:
    def last() -> Any:
        return None

    found: Callable[[], Any] = last
    for _ in range(length):
        found = (lambda inner: lambda: inner)(found)
    return found


@pytest.mark.parametrize("make", [lambda: nested(2000), lambda: chain(2000), lambda: {"x": [nested(600), chain(600)]}])
def test_what_is_nested_deep_is_left_to_the_loader(folder: Path, make: Callable[[], Any]) -> None:
    found = load_both_ways(lambda: Model(lambda model: setattr(model, "thing", make())), folder, on_meta=True)
    found.assert_equal()
    assert found.traced.fallback is None
    assert type(found.got.thing) is type(make())


class Refusing(dict[str, Any]):
    def __bool__(self) -> bool:
        raise RuntimeError("nobody asked")

    def __len__(self) -> int:
        raise RuntimeError("nobody asked")


class Hollow(dict[str, int]):
    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0


def test_containers_are_not_asked_whether_something_is_in_them(folder: Path) -> None:
    assert traced(folder, Model(lambda model: None, Refusing(x=1))).fallback is None
    model = Model(lambda model: model.thing.__setitem__("n", model.thing["n"] + 1), Hollow(n=0))
    assert list(traced(folder, model).opaque) == ["thing"]
    assert model.thing["n"] == 0


def test_a_container_that_makes_or_keeps_something_else_takes_the_place_of_the_old_one(folder: Path) -> None:
    def end(model: Any) -> None:
        model.thing["recent"] = deque([1, 2, 3], maxlen=8)
        model.thing["n"] = defaultdict(int, a=1)

    def build() -> Model:
        return Model(end, {"recent": deque([0], maxlen=1), "n": defaultdict(list)})

    got: Any = load_both_ways(build, folder, on_meta=True).got
    assert (got.thing["recent"], got.thing["recent"].maxlen) == (deque([1, 2, 3]), 8)
    assert (got.thing["n"], got.thing["n"].default_factory) == ({"a": 1}, int)


class Slotted:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Hiding:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ValueError("not yours")


class Meta(type):
    def __eq__(cls, other: object) -> bool:
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


class Odd(metaclass=Meta):
    pass


class Something:
    pass


def dead() -> Any:
    return weakref.proxy(Something())


@pytest.mark.parametrize("make", [Slotted, Hiding, Odd, lambda: [dead(), {1: Odd()}]])
@pytest.mark.parametrize("was_there", [False, True])
def test_objects_are_not_asked_what_they_are(folder: Path, make: Callable[[], Any], was_there: bool) -> None:
    kept = make()

    def end(model: Any) -> None:
        model.flag = 1
        if not was_there:
            model.thing = kept

    model = Model(end, kept if was_there else None)
    found = traced(folder, model)
    assert found.fallback is None
    assert list(found.opaque) == ["thing"] * (not was_there)


def test_a_weak_reference_to_the_model_is_no_part_of_it(folder: Path) -> None:
    model = Model(lambda model: setattr(model.sub, "owner", weakref.proxy(model)))
    assert list(traced(folder, model).opaque) == ["sub.owner"]
    assert not hasattr(model.sub, "owner")
