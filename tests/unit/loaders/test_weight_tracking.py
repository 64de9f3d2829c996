"""Models with their own load_weights: what they forget, misname or fill in part is found, whatever they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry.core import Strictness
from tensorferry.errors import FinalizeError, PlanError
from tensorferry.loaders import DefaultModelLoader, LoadConfig, ModelConfig
from tensorferry.problems import ProblemKind
from tensorferry.report import Report

Weights = Iterable[tuple[str, torch.Tensor]]

WEIGHTS = {
    "q.weight": ar(2, 3),
    "k.weight": ar(1, 3, start=10),
    "v.weight": ar(1, 3, start=20),
    "norm.weight": ar(4, start=30),
}
ROWS = {"q.weight": (0, 2), "k.weight": (2, 1), "v.weight": (3, 1)}
MERGED = [[0, 1, 2], [3, 4, 5], [10, 11, 12], [20, 21, 22]]


class Attention(nn.Module):
    """Queries, keys and values in one parameter; `fill` is its load_weights."""

    def __init__(self, fill: Callable[[Attention, Weights], Any]) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.full((4, 3), -1.0))
        self.norm = nn.LayerNorm(4, bias=False)
        self._fill = fill

    def load_weights(self, weights: Weights) -> Any:
        return self._fill(self, weights)

    def put(self, name: str, tensor: torch.Tensor) -> str:
        if name in ROWS:
            self.qkv.data.narrow(0, *ROWS[name]).copy_(tensor)
            return "qkv"
        self.norm.weight.data.copy_(tensor)
        return "norm.weight"


def good(model: Attention, weights: Weights) -> set[str]:
    return {model.put(name, tensor) for name, tensor in weights}


def forgets_values(model: Attention, weights: Weights) -> set[str]:
    return {model.put(name, tensor) for name, tensor in weights if name != "v.weight"}


def forgets_the_norm(model: Attention, weights: Weights) -> None:
    for name, tensor in weights:
        if "norm" not in name:
            model.put(name, tensor)


def says_what_is_not_so(model: Attention, weights: Weights) -> set[str]:
    forgets_the_norm(model, weights)
    return {"qkv", "norm.weight", "mlp.weight"}


def load(
    folder: Path, fill: Callable[[Attention, Weights], Any], how: str = "stream", **options: Any
) -> tuple[Attention, Report]:
    write_safetensors(folder / "model.safetensors", options.pop("weights", WEIGHTS))
    loader = DefaultModelLoader(LoadConfig.from_dict({"own_loader": how, **options}))
    model = loader.load_model(ModelConfig(str(folder)), build=lambda c: Attention(fill))
    assert isinstance(model, Attention)
    assert loader.report is not None
    return model, loader.report


BOTH = pytest.mark.parametrize("how", ["trace", "stream"])


@BOTH
def test_a_loader_that_does_its_work_is_believed(how: str, tmp_path: Path) -> None:
    model, report = load(tmp_path, good, how)
    assert model.qkv.tolist() == MERGED
    assert model.norm.weight.tolist() == [30, 31, 32, 33]
    assert (report.unexpected, report.missing, report.warnings) == ((), (), ())
    assert report.bytes_needed == report.bytes_read == 4 * (12 + 4)


def test_what_is_traced_is_planned_and_what_is_streamed_is_told(tmp_path: Path) -> None:
    assert load(tmp_path, good, "trace")[1].streamed == {}
    streamed = load(tmp_path, good, "stream")[1].streamed
    assert streamed == dict.fromkeys(["qkv", "norm.weight"], "streaming was asked for")


@BOTH
def test_a_part_that_is_forgotten_is_missing_though_its_name_was_returned(how: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="9 of its 12 elements") as refused:
        load(tmp_path, forgets_values, how)
    assert [(p.kind, p.subject) for p in refused.value.problems] == [(ProblemKind.MISSING, "qkv")]
    assert refused.value.touched == (how == "stream")


@BOTH
def test_a_forgotten_parameter_is_found_without_any_names_returned(how: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as refused:
        load(tmp_path, forgets_the_norm, how)
    assert [(p.kind, p.subject) for p in refused.value.problems] == [(ProblemKind.MISSING, "norm.weight")]


def test_writing_counts_and_saying_so_does_not(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="says that it loaded it, and wrote nothing to it"):
        load(tmp_path, says_what_is_not_so)


@BOTH
def test_names_that_the_model_does_not_have_become_a_warning(how: str, tmp_path: Path) -> None:
    def misnames(model: Attention, weights: Weights) -> set[str]:
        return good(model, weights) | {"nrom.weight"}

    _, report = load(tmp_path, misnames, how)
    assert report.warnings == ("load_weights says that it loaded nrom.weight, which the model does not have",)


@BOTH
def test_a_tensor_that_nothing_looks_at_is_unexpected(how: str, tmp_path: Path) -> None:
    def skips(model: Attention, weights: Weights) -> None:
        for name, tensor in weights:
            if name in WEIGHTS:
                model.put(name, tensor)
            else:
                assert tensor.shape == (2,)

    weights = {**WEIGHTS, "extra": ar(2), "rotary_emb.inv_freq": ar(2), "a.rotary_emb.inv_freq": ar(2)}
    _, report = load(tmp_path, skips, how, weights=weights)
    assert "extra" in report.unexpected
    assert "a.rotary_emb.inv_freq" not in report.unexpected
    with pytest.raises(PlanError, match="unexpected: extra: the model's loader ignores it"):
        load(tmp_path, skips, how, weights=weights, strictness={"unexpected": "error"})


@BOTH
def test_a_similar_name_is_offered_for_the_parameter_that_waits(how: str, tmp_path: Path) -> None:
    def by_name(model: Attention, weights: Weights) -> None:
        for name, tensor in weights:
            if name in WEIGHTS:
                model.put(name, tensor)

    weights = {**{k: v for k, v in WEIGHTS.items() if k != "norm.weight"}, "norm.weights": ar(4)}
    with pytest.raises(PlanError, match=r"norm\.weight.*did you mean norm\.weights\?"):
        load(tmp_path, by_name, how, weights=weights)


def test_loosening_is_explicit_and_reported(tmp_path: Path) -> None:
    model, report = load(tmp_path, forgets_the_norm, strictness={"may_miss": ["norm.{x:part}"]})
    assert model.norm.weight.tolist() == [1, 1, 1, 1]
    assert report.missing == ("norm.weight",)
    assert load(tmp_path, forgets_values, strictness={"missing": "warn"})[1].missing == ("qkv",)


def test_what_may_miss_and_had_no_memory_is_refused_all_the_same(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", WEIGHTS)

    def on_meta(config: ModelConfig) -> nn.Module:
        with torch.device("meta"):
            return Attention(forgets_the_norm)

    loader = DefaultModelLoader(LoadConfig(own_loader="stream", strictness=Strictness(missing="warn")))
    with pytest.raises(FinalizeError, match=r"nothing filled norm\.weight"):
        loader.load_model(ModelConfig(str(tmp_path)), build=on_meta)


def test_a_model_on_meta_is_streamed_into_memory(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", WEIGHTS)

    def on_meta(config: ModelConfig) -> nn.Module:
        with torch.device("meta"):
            return Attention(good)

    loader = DefaultModelLoader(LoadConfig(own_loader="stream"))
    model = loader.load_model(ModelConfig(str(tmp_path)), build=on_meta)
    assert model.get_parameter("qkv").tolist() == MERGED


@pytest.mark.parametrize(
    "write",
    [
        lambda p, t: p.data.copy_(t),
        lambda p, t: p.data.__setitem__(slice(None), t),
        lambda p, t: p.data.view(-1).copy_(t.view(-1)),
        lambda p, t: torch.mul(t, 1, out=p.data),
        lambda p, t: setattr(p, "data", t),
        lambda p, t: [p.data[i].copy_(t[i]) for i in range(4)],
        lambda p, t: (p.data[::2].copy_(t[::2]), p.data[1::2].copy_(t[1::2])),
        lambda p, t: p.data.index_copy_(0, torch.arange(4), t),
        lambda p, t: p.data.zero_().add_(t),
    ],
    ids=["copy", "setitem", "view", "out", "assign", "rows", "strided", "index", "accumulate"],
)
def test_every_way_to_write_counts(write: Callable[[nn.Parameter, torch.Tensor], Any], tmp_path: Path) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def load_weights(self, weights: Weights) -> None:
            for _, tensor in weights:
                write(self.weight, tensor)

    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(4, start=1)})
    loader = DefaultModelLoader(LoadConfig(own_loader="stream", strictness=Strictness.strict()))
    model = loader.load_model(ModelConfig(str(tmp_path)), build=lambda c: One())
    assert model.get_parameter("weight").tolist() == [1, 2, 3, 4]


def test_a_replaced_parameter_counts_as_written(tmp_path: Path) -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def load_weights(self, weights: Weights) -> None:
            for _, tensor in weights:
                self.weight = nn.Parameter(tensor)

    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(4)})
    loader = DefaultModelLoader(LoadConfig(own_loader="stream", strictness=Strictness.strict()))
    model = loader.load_model(ModelConfig(str(tmp_path)), build=lambda c: Replaces())
    assert model.get_parameter("weight").tolist() == [0, 1, 2, 3]


def test_every_second_row_is_half_of_a_parameter(tmp_path: Path) -> None:
    def interleaves(model: Attention, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "norm.weight":
                model.put(name, tensor)
            elif name == "q.weight":
                model.qkv.data[::2].copy_(tensor)

    with pytest.raises(PlanError, match="qkv: the model's load_weights wrote 6 of its 12 elements"):
        load(tmp_path, interleaves)


def test_what_cannot_be_traced_is_streamed_and_checked_all_the_same(tmp_path: Path) -> None:
    def looks_at_values(model: Attention, weights: Weights) -> None:
        for name, tensor in weights:
            if tensor.max().item() >= 0:
                model.put(name, tensor)

    model, report = load(tmp_path, looks_at_values, "trace")
    assert model.qkv.tolist() == MERGED
    assert set(report.streamed) == {"qkv", "norm.weight"}
    assert any("could not be traced" in warning for warning in report.warnings)

    def forgets_too(model: Attention, weights: Weights) -> None:
        looks_at_values(model, ((n, t) for n, t in weights if n != "k.weight"))

    with pytest.raises(PlanError, match="wrote 9 of its 12 elements"):
        load(tmp_path, forgets_too, "trace")


def test_what_is_planned_and_what_is_streamed_make_one_report(tmp_path: Path) -> None:
    def adds_one(model: Attention, weights: Weights) -> None:
        for name, tensor in weights:
            model.put(name, tensor + 1 if name == "norm.weight" else tensor)

    model, report = load(tmp_path, adds_one, "trace", read={"max_gap": 0})
    assert model.norm.weight.tolist() == [31, 32, 33, 34]
    assert model.qkv.tolist() == MERGED
    assert set(report.streamed) == {"norm.weight"}
    assert report.bytes_needed == report.bytes_read == 4 * (12 + 4)
    assert report.executor == "ThreadedExecutor"


def test_post_processing_waits_for_what_is_streamed(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    class Processed(Attention):
        def process_weights_after_loading(self) -> None:
            seen.append([self.qkv[0, 0].item(), self.norm.weight[0].item()])

    def adds_one(model: Attention, weights: Weights) -> None:
        for name, tensor in weights:
            model.put(name, tensor + 1 if name == "norm.weight" else tensor)

    write_safetensors(tmp_path / "model.safetensors", WEIGHTS)
    DefaultModelLoader().load_model(ModelConfig(str(tmp_path)), build=lambda c: Processed(adds_one))
    assert seen == [[0, 31]]


class WithNothing(nn.Module):
    """Has a tensor without elements beside one that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.norm = nn.Parameter(torch.zeros(2))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


@BOTH
@pytest.mark.parametrize("saved", [{"norm"}, {"norm", "empty"}])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_without_elements_needs_nothing(tmp_path: Path, how: Any, saved: set[str], device: str) -> None:
    values = {"norm": ar(2, start=5), "empty": torch.zeros(0, 2)}
    write_safetensors(tmp_path / "model.safetensors", {name: values[name] for name in saved})
    with torch.device(device):
        model = WithNothing()
    DefaultModelLoader(LoadConfig(own_loader=how)).load_weights(model, ModelConfig(str(tmp_path)))
    assert model.norm.tolist() == [5, 6]
    assert model.empty.device.type == "cpu"
