"""What loaders hang on modules beside values of the checkpoint: the model has it in the end, or it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def test_what_is_lost_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def end(model: Any, given: dict[str, torch.Tensor]) -> None:
        model.thing = lambda: given
        model.a.mark = 1
        model.seen.clear()

    model = Model(end, True)
    assert list(traced_of(folder, model).opaque) == ["norm"]
    assert model.thing is None
    assert [record.args for record in caplog.records] == [("thing",), ("a.mark",)]
    assert "thing: what the model's loader sets there is not followed" in caplog.text
