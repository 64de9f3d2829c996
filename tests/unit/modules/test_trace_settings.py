"""What loaders hang on modules beside values of the checkpoint: the model has it in the end, or it is told."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.old_loaders import load_both_ways
from tensorferry.formats.opening import open_files
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.modules.trace import Traced, trace

SHAPES = {"a": (4, 6), "b": (4, 6), "norm": (6,)}
End = Callable[[Any, dict[str, torch.Tensor]], object]


class Model(nn.Module):
    """It copies entries of the names of its parameters; `end` comes after the last, told of all.

    adds: whether one is added to `norm`, so that this is streamed later, alone.
    """

    def __init__(self, end: End, adds: bool) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=False))
        self.sub: nn.Module | None = nn.Dropout()
        self.flag = True
        self.lacking: list[str] = []
        self.seen: set[str] = set()
        self.thing: Any = None
        self.spare = 1
        self.end, self.adds = end, adds

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = {}
        for name, weight in weights:
            given[name] = weight
            self.seen.add(name)
            self.get_parameter(name).data.copy_(weight + 1 if self.adds and name == "norm" else weight)
        self.end(self, given)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {name: ar(*shape, start=100.0 * i + 1) for i, (name, shape) in enumerate(SHAPES.items())}
    return write_safetensors(tmp_path / "model.safetensors", tensors).parent


def both(folder: Path, end: End, adds: bool = False) -> list[Any]:
    """Trace on a twin on meta and on the model itself; values of parameters are right both ways."""
    found = [load_both_ways(lambda: Model(end, adds), folder, on_meta=on_meta) for on_meta in (True, False)]
    for loaded in found:
        loaded.assert_equal()
    return found


def traced_of(folder: Path, model: nn.Module) -> Traced:
    with open_files(folder) as opened:
        return trace(model, opened.catalogue)


def without_b(do: Callable[[Any], object]) -> End:
    """Return what does something only where there is no `b`."""
    return lambda model, given: None if "b" in given else do(model)


@pytest.mark.parametrize(("do", "attribute"), [
    (lambda m: setattr(m, "flag", False), "flag"),
    (lambda m: m.lacking.append("b"), "lacking"),
    (lambda m: setattr(m, "lacking", ["b"]), "lacking"),
    (lambda m: setattr(m, "thing", print), "thing"),
    (lambda m: delattr(m, "spare"), "spare"),
])  # fmt: skip
def test_what_is_set_only_for_a_part_of_the_checkpoint_is_put_back(
    folder: Path, do: Callable[[Any], object], attribute: str
) -> None:
    for loaded in both(folder, without_b(do), adds=True):
        assert loaded.traced.fallback is None
        assert loaded.traced.stream == ("norm",)
        assert getattr(loaded.got, attribute) == getattr(loaded.expected, attribute)
        assert loaded.got.seen == loaded.expected.seen == set(SHAPES)


def test_what_is_new_only_for_a_part_of_the_checkpoint_is_deleted_again(folder: Path) -> None:
    for loaded in both(folder, without_b(lambda m: setattr(m, "other", 1)), adds=True):
        assert loaded.traced.fallback is None
        assert not hasattr(loaded.got, "other")


@pytest.mark.parametrize(("do", "name"), [
    (lambda m: setattr(m, "sub", None), "sub"),
    (lambda m: delattr(m, "sub"), "sub"),
    (lambda m: setattr(m, "b", None), "b"),
])  # fmt: skip
def test_a_part_that_takes_something_off_the_model_is_not_streamed_alone(
    folder: Path, do: Callable[[Any], object], name: str
) -> None:
    for loaded in both(folder, without_b(do), adds=True):
        assert loaded.traced.fallback == f"sets {name} only when it gets a part of the checkpoint"
        assert loaded.traced.stream == tuple(SHAPES)
        assert isinstance(loaded.got.sub, nn.Dropout)


def test_a_part_that_hangs_a_tensor_on_the_model_is_not_streamed_alone(folder: Path) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.thing = torch.tensor([1.0]) if "b" in given else given["norm"]

    for loaded in both(folder, end, adds=True):
        assert loaded.traced.fallback == "does something else when it gets only a part of the checkpoint"
        assert torch.equal(loaded.got.thing, torch.tensor([1.0]))


@pytest.mark.parametrize("adds", [False, True])
def test_another_value_for_a_part_does_no_harm(folder: Path, adds: bool) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.flag = "b" not in given
        model.spare += len(given)

    for loaded in both(folder, end, adds):
        assert loaded.traced.fallback is None
        assert (loaded.got.flag, loaded.got.spare) == (False, 4)


@pytest.mark.parametrize("adds", [False, True])
def test_tensors_that_the_loader_makes_of_numbers_are_set_again(folder: Path, adds: bool) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        index = torch.tensor([1, 2])
        model.thing = index
        model.other = {"pairs": [(index + 1, "x")], "first": index}

    for loaded in both(folder, end, adds):
        assert list(loaded.traced.opaque) == ["norm"] * adds
        assert loaded.got.thing.tolist() == [1, 2]
        assert loaded.got.other["pairs"][0][0].tolist() == [2, 3]
        assert loaded.got.other["first"] is loaded.got.thing


def test_numbers_that_belong_where_the_model_is_are_left_to_the_loader_if_that_is_not_known(folder: Path) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.thing = torch.tensor([1, 2], device=model.a.device)

    on_meta, itself = both(folder, end)
    assert on_meta.traced.opaque == {"thing": "is set by the loader to a tensor of its own"}
    assert on_meta.traced.stream == itself.traced.stream == ()
    assert itself.traced.opaque == {}
    assert on_meta.got.thing.tolist() == itself.got.thing.tolist() == [1, 2]


@pytest.mark.parametrize("made", [
    lambda w: (w * 2,), lambda w: {"x": [{"y": w * 2}]}, lambda w: SimpleNamespace(w=[w * 2]), lambda w: [print, w * 2],
])  # fmt: skip
def test_values_of_the_checkpoint_are_found_wherever_they_lie(
    folder: Path, made: Callable[[torch.Tensor], Any]
) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        if "norm" in given:
            model.thing = made(given["norm"])

    def numbers(value: Any) -> list[float]:
        while not isinstance(value, torch.Tensor):
            value = vars(value) if isinstance(value, SimpleNamespace) else value
            value = list(value.values())[-1] if isinstance(value, dict) else value[-1]
        found: list[float] = value.tolist()
        return found

    for loaded in both(folder, end):
        assert loaded.traced.stream == ("norm",)
        assert numbers(loaded.got.thing) == [402.0, 404.0, 406.0, 408.0, 410.0, 412.0]


def test_a_tensor_without_values_is_left_to_the_loader(folder: Path) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.thing = torch.zeros(2, device=model.a.device)

    for loaded in both(folder, end):
        assert loaded.traced.stream == ()
        assert loaded.got.thing.tolist() == [0, 0]


def test_a_view_of_a_parameter_is_one_of_that_of_the_model(folder: Path) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.thing = model.norm.data[:2]

    for loaded in both(folder, end):
        assert loaded.traced.fallback is None
        assert loaded.got.thing.data_ptr() == loaded.got.norm.data_ptr()


def test_modules_that_the_loader_makes_are_made_by_it(folder: Path) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.sub = nn.GELU()
        model.thing = [nn.GELU()]

    for loaded in both(folder, end):
        assert dict(loaded.traced.opaque) == {
            "sub": "is set by the loader to what no plan can make",
            "thing": "is set by the loader to what no plan can make",
        }
        assert isinstance(loaded.got.sub, nn.GELU)
        assert isinstance(loaded.got.thing[0], nn.GELU)


def test_parameters_that_the_loader_ties_are_tied(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ar(4, 6), "norm": ar(6)})

    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.b = model.a

    for loaded in both(tmp_path, end):
        assert list(loaded.traced.opaque) == ["b"]
        assert loaded.got.b is loaded.got.a


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("on_meta", [False, True])
def test_what_the_loader_takes_off_need_not_be_filled_and_is_gone(
    folder: Path, on_meta: bool, deletes: bool, adds: bool
) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        for name in ("head", "bias", "spare"):
            delattr(model, name) if deletes else setattr(model, name, None)

    def build(config: ModelConfig) -> nn.Module:
        with torch.device("meta" if on_meta else "cpu"):
            model: Any = Model(end, adds)
            model.head = nn.Linear(3, 3)
            model.head.count = 0
            model.bias = nn.Parameter(torch.empty(3))
        return model  # type: ignore[no-any-return]

    loader = get_model_loader(LoadConfig())
    model = loader.load_model(ModelConfig(str(folder)), build)
    assert loader.report is not None
    assert list(loader.report.streamed) == ["norm"] * adds
    assert [getattr(model, name, None) for name in ("head", "bias", "spare")] == [None] * 3
    assert hasattr(model, "head") != deletes
    assert torch.equal(model.get_parameter("b"), ar(4, 6, start=101))


def test_what_hangs_on_the_model_by_another_name_has_to_be_filled(folder: Path) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.head = None

    model: Any = Model(end, False)
    model.head = model.same = nn.Linear(3, 3)
    assert traced_of(folder, model).plan.missing == ("head.weight", "head.bias")


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("thing", [print, lambda: 1, object(), SimpleNamespace(x=1), [print, 1]])
def test_what_cannot_be_copied_is_set_by_the_loader(folder: Path, thing: Any, adds: bool) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.thing = model.a.mark = thing

    for loaded in both(folder, end, adds):
        assert loaded.traced.fallback is None
        assert list(loaded.traced.opaque) == [*["norm"] * adds, "thing", "a.mark"]
        assert loaded.traced.stream == ("norm",) * adds
        assert loaded.got.thing is loaded.got.a.mark is thing


@pytest.mark.parametrize("adds", [False, True])
def test_what_the_loader_notes_on_a_parameter_is_set_again(folder: Path, adds: bool) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.a.mark = "loaded"
        model.get_parameter("b").order = [*getattr(model.b, "order", []), len(given)]

    for loaded in both(folder, end, adds):
        assert loaded.traced.fallback is None
        assert loaded.got.a.mark == "loaded"
        assert loaded.got.b.order == [3]


def test_values_that_the_loader_gives_to_a_parameter_to_keep_are_streamed(folder: Path) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        if "norm" in given:
            model.a.parts = [given["norm"]]

    for loaded in both(folder, end):
        assert loaded.traced.opaque == {"a.parts": "is set by the loader to what no plan can make"}
        assert loaded.traced.stream == ("norm",)
        assert torch.equal(loaded.got.a.parts[0], ar(6, start=201))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("thing", "change", "found"), [
    ({"x": [{"y": [0]}]}, lambda t: t["x"][0]["y"].append(1), {"x": [{"y": [0, 1]}]}),
    (([0],), lambda t: t[0].append(1), ([0, 1],)),
    (OrderedDict(a=1, b=2), lambda t: t.move_to_end("a"), OrderedDict(b=2, a=1)),
    (defaultdict(list), lambda t: t["x"].append(1), {"x": [1]}),
    (defaultdict(list, x=[0]), lambda t: t["x"].append(1), {"x": [0, 1]}),
    (Counter(), lambda t: t.update("aab"), Counter(a=2, b=1)),
    (deque([1, 2], maxlen=2), lambda t: t.append(3), deque([2, 3], maxlen=2)),
    ([set()], lambda t: t[0].add(1), [{1}]),
])  # fmt: skip
def test_containers_that_the_loader_fills_have_it_once(
    folder: Path, thing: Any, change: Callable[[Any], object], found: Any, adds: bool
) -> None:
    def build() -> Model:
        model = Model(lambda model, given: change(model.thing), adds)
        model.thing = deepcopy(thing)
        return model

    for on_meta in (True, False):
        model = build()
        traced_of(folder, model)
        assert model.thing == thing, "tracing leaves them as they were"
        loaded = load_both_ways(build, folder, on_meta=on_meta)
        loaded.assert_equal()
        assert loaded.traced.fallback is None
        assert loaded.got.thing == loaded.expected.thing == found
        assert type(loaded.got.thing) is type(thing)


def test_containers_in_containers_stay_the_objects_that_they_were(folder: Path) -> None:
    model = Model(lambda model, given: model.thing["x"][0].append(len(given)), False)
    inner: list[int] = [0]
    model.thing = {"x": [inner]}
    with open_files(folder) as opened:
        traced = trace(model, opened.catalogue)
    traced.settle(model)
    assert model.thing["x"][0] is inner
    assert inner == [0, 3]


class Watched(dict[str, Any]):
    """One of which nobody knows what a copy would be."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.count = getattr(self, "count", 0) + 1


@pytest.mark.parametrize("adds", [False, True])
def test_a_container_of_a_class_of_its_own_is_put_back_and_left_to_the_loader(folder: Path, adds: bool) -> None:
    def build() -> Model:
        model = Model(lambda model, given: model.thing.update(y=2), adds)
        model.thing = Watched(x=1)
        return model

    model = build()
    traced_of(folder, model)
    assert model.thing == {"x": 1}
    for on_meta in (True, False):
        loaded = load_both_ways(build, folder, on_meta=on_meta)
        assert loaded.traced.fallback is None
        assert loaded.got.thing == {"x": 1, "y": 2}


def noted(model: Any, how: str, *args: Any) -> None:
    model.seen.add(how)


HOOKS: list[Callable[[Any], object]] = [
    lambda m: m.register_forward_hook(partial(noted, m, "forward")),
    lambda m: m.sub.register_forward_pre_hook(lambda module, args: noted(m, "before")),
    lambda m: m.sub.register_forward_pre_hook(lambda module, args, kwargs: noted(m, "with"), with_kwargs=True),
    lambda m: m.register_state_dict_post_hook(lambda *args: noted(m, "state")),
    lambda m: m.register_load_state_dict_pre_hook(lambda *args: noted(m, "load")),
    lambda m: m.register_full_backward_hook(lambda *args: noted(m, "backward")),
]  # fmt: skip


def hooks_of(model: nn.Module) -> dict[str, int]:
    return {
        f"{path}.{name}": len(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if "hooks" in name and value
    }


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("register", HOOKS)
def test_hooks_that_the_loader_registers_are_there_once(
    folder: Path, register: Callable[[Any], object], adds: bool
) -> None:
    for loaded in both(folder, lambda model, given: register(model), adds):
        assert loaded.traced.fallback is None
        assert loaded.traced.stream == ("norm",) * adds
        assert hooks_of(loaded.got) == hooks_of(loaded.expected) != {}
    model = Model(lambda model, given: register(model), adds)
    traced_of(folder, model)
    assert hooks_of(model) == {}


def test_a_hook_that_keeps_values_of_the_checkpoint_gets_them(folder: Path) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        if "norm" in given:
            norm = given["norm"] * 2
            model.sub.register_forward_hook(lambda module, args, out: out + norm)

    for loaded in both(folder, end):
        assert loaded.traced.stream == ("norm",)
        assert torch.equal(loaded.got.sub(torch.zeros(6)), 2 * ar(6, start=201))


def test_a_hook_that_only_the_whole_checkpoint_brings_has_all_of_it_streamed(folder: Path) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        if len(given) == len(SHAPES):
            model.register_forward_hook(lambda *args: noted(model, "forward"))

    for loaded in both(folder, end):
        assert loaded.traced.fallback == "does something else when it gets only a part of the checkpoint"
        assert hooks_of(loaded.got) == {"._forward_hooks": 1}


@pytest.mark.parametrize("choose", [
    lambda m, is_part: setattr(m, "thing", m.x if is_part else m.y),
    lambda m, is_part: setattr(m, "sub", m.x if is_part else m.y),
    lambda m, is_part: setattr(m, "thing", {"in": [m.a if is_part else m.b]}),
    lambda m, is_part: setattr(m, "thing", m.a.data[:2] if is_part else m.a.data[2:]),
    lambda m, is_part: setattr(m, "sub", nn.Dropout(0.5 if is_part else 0.25)),
    lambda m, is_part: setattr(m, "sub", nn.ReLU() if is_part else nn.GELU()),
    lambda m, is_part: setattr(m, "thing", partial(noted, m, "part" if is_part else "whole")),
    lambda m, is_part: setattr(m, "thing", lambda: (m, is_part)),
])  # fmt: skip
def test_another_choice_for_a_part_has_everything_streamed(folder: Path, choose: Callable[[Any, bool], object]) -> None:
    class Chosen(Model):
        def __init__(self) -> None:
            super().__init__(lambda model, given: choose(model, "b" not in given), True)
            self.x, self.y = nn.Dropout(0.1), nn.Dropout(0.2)

    for on_meta in (True, False):
        loaded = load_both_ways(Chosen, folder, on_meta=on_meta)
        loaded.assert_equal()
        assert loaded.traced.fallback == "does something else when it gets only a part of the checkpoint"


@pytest.mark.parametrize("choose", [
    lambda m: setattr(m, "thing", m.x),
    lambda m: setattr(m, "sub", m.x),
    lambda m: setattr(m, "thing", {"in": [m.a, float("nan"), {1, m.x}]}),
    lambda m: setattr(m, "thing", m.a.data[2:]),
    lambda m: setattr(m, "sub", nn.Sequential(nn.Dropout(0.25), nn.ReLU())),
    lambda m: setattr(m, "thing", partial(noted, m, "x")),
    lambda m: setattr(m, "thing", [lambda: m, m.forward]),
    lambda m: setattr(m, "thing", SimpleNamespace(x=m.x, count=object())),
])  # fmt: skip
def test_the_same_choice_for_a_part_is_no_harm(folder: Path, choose: Callable[[Any], object]) -> None:
    class Chosen(Model):
        def __init__(self) -> None:
            super().__init__(lambda model, given: choose(model), True)
            self.x = nn.Dropout(0.1)

    for on_meta in (True, False):
        loaded = load_both_ways(Chosen, folder, on_meta=on_meta)
        loaded.assert_equal()
        assert loaded.traced.fallback is None
        assert loaded.traced.stream == ("norm",)
