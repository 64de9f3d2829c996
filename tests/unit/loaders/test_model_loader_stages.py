"""The stages of loading a model: surroundings, building, weights, post-processing, eval."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry.core import Place, RuleSet
from tensorferry.errors import ConfigError, FinalizeError, PlanError
from tensorferry.loaders import BaseModelLoader, DefaultModelLoader, LoadConfig, ModelConfig

WEIGHTS = {"first.weight": ar(2, 3), "first.bias": ar(2, start=10), "second.weight": ar(1, 2, start=20)}


class Spy(nn.Module):
    """Writes down what happens to it, and what was there when it did."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.events: list[Any] = [("build", torch.get_default_dtype(), torch.empty(0).device.type, config.model)]
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(2, 1, bias=False)

    def process_weights_after_loading(self) -> None:
        self.events.append(("process", self.first.bias.tolist(), self.training))

    def eval(self) -> Spy:
        self.events.append("eval")
        return super().eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", WEIGHTS)
    return tmp_path


def test_a_model_is_built_then_filled_then_post_processed_then_set_to_eval(folder: Path) -> None:
    model = DefaultModelLoader().load_model(ModelConfig(str(folder), dtype="float64"), build=Spy)
    assert isinstance(model, Spy)
    assert model.events[:2] == [("build", torch.float64, "cpu", str(folder)), ("process", [10.0, 11.0], True)]
    assert set(model.events[2:]) == {"eval"}
    assert not model.training
    assert model.first.weight.dtype == torch.float64
    assert torch.equal(model.first.weight, WEIGHTS["first.weight"].double())


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_default_dtype_and_device_are_as_before_even_when_building_fails(folder: Path, dtype: str | None) -> None:
    def failing(config: ModelConfig) -> nn.Module:
        assert torch.empty(0).device.type == "cpu"
        raise RuntimeError("no such layer")

    loader = DefaultModelLoader(LoadConfig(device="cpu"))
    with torch.device("meta"):
        with pytest.raises(RuntimeError, match="no such layer"):
            loader.load_model(ModelConfig(str(folder), dtype=dtype), build=failing)
        assert torch.empty(0).device.type == "meta"
    assert torch.get_default_dtype() == torch.float32


def test_a_device_where_nothing_can_be_put_is_refused_before_the_model_is_built(folder: Path) -> None:
    def never(config: ModelConfig) -> nn.Module:
        raise AssertionError

    for device in ("meta", "gpu", "xla:0"):
        with pytest.raises(ConfigError, match="device "):
            DefaultModelLoader(LoadConfig(device=device)).load_model(ModelConfig(str(folder)), build=never)


def test_a_model_may_be_built_on_meta(folder: Path) -> None:
    def on_meta(config: ModelConfig) -> nn.Module:
        with torch.device("meta"):
            return Spy(config)

    model = DefaultModelLoader().load_model(ModelConfig(str(folder)), build=on_meta)
    assert {name: p.tolist() for name, p in model.named_parameters()} == {n: t.tolist() for n, t in WEIGHTS.items()}


def test_what_build_returns_must_be_a_module(folder: Path) -> None:
    wrong: Any = lambda config: {"not": "a module"}  # noqa: E731
    with pytest.raises(ConfigError, match=r"returned dict, where an nn\.Module is expected"):
        DefaultModelLoader().load_model(ModelConfig(str(folder)), build=wrong)


def test_the_report_has_every_phase_and_the_log_too(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = DefaultModelLoader()
    with caplog.at_level(logging.INFO, logger="tensorferry.loaders"):
        loader.load_model(ModelConfig(str(folder)), build=Spy)
    assert loader.report is not None
    phases = ["initialize", "open", "describe", "plan", "schedule", "load", "finalize", "post-process"]
    assert list(loader.report.seconds) == phases
    assert all(f"{phase} 0." in caplog.text for phase in phases)
    assert loader.report.post_processed == ("",)
    assert json.loads(loader.report.to_json())["parameters"] == 3


class Careless(BaseModelLoader):
    """A plug-in that fills a model and does nothing else."""

    def download_model(self, model_config: ModelConfig) -> None: ...

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> Any:
        from tensorferry import load

        report = load(nn.ModuleDict(dict(model.named_children())), model_config.model)
        model.train()
        return report


def test_what_a_loader_leaves_undone_the_base_class_does(folder: Path) -> None:
    loader = Careless()
    model = loader.load_model(ModelConfig(str(folder)), build=Spy)
    assert isinstance(model, Spy)
    assert [e if isinstance(e, str) else e[0] for e in model.events][:2] == ["build", "process"]
    assert not model.training
    assert loader.report is not None
    assert loader.report.post_processed == ("",)


def test_a_loader_that_cannot_build_says_so(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Careless does not build models: pass build="):
        Careless().load_model(ModelConfig(str(folder)))


def test_a_models_own_rules_say_where_its_weights_go(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"old.weight": ar(1, 3)})

    class Renamed(nn.Linear):
        weight_rules = RuleSet(Place("old.{x:path}", "{x}"))

        def load_weights(self, weights: Any) -> None:
            raise AssertionError("rules come before a model's own loader")

    model = DefaultModelLoader().load_model(ModelConfig(str(tmp_path)), build=lambda c: Renamed(3, 1, bias=False))
    assert model.get_parameter("weight").tolist() == [[0, 1, 2]]
    model.weight_rules = {"old": "new"}  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="weight_rules of Renamed is dict, not a RuleSet"):
        DefaultModelLoader().load_weights(model, ModelConfig(str(tmp_path)))


def test_what_no_checkpoint_can_carry_is_exempt_and_nothing_else_is(tmp_path: Path) -> None:
    class Method:
        not_in_checkpoint = ("input_scale_ub",)

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.scale = nn.Parameter(torch.zeros(1))
            self.input_scale_ub = nn.Parameter(torch.tensor(7.0))
            self.quant_method = Method()

    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2), "scale": ar(1)})
    model = DefaultModelLoader().load_model(ModelConfig(str(tmp_path)), build=lambda c: Quantized())
    assert model.get_parameter("input_scale_ub").item() == 7.0
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2)})
    with pytest.raises(PlanError) as refused:
        DefaultModelLoader().load_weights(model, ModelConfig(str(tmp_path)))
    assert [p.subject for p in refused.value.problems] == ["scale"]


def test_what_is_exempt_still_needs_a_value(tmp_path: Path) -> None:
    class Half(nn.Module):
        not_in_checkpoint = ("scale",)

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.scale = nn.Parameter(torch.zeros(1, device="meta"))

    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2)})
    with pytest.raises(FinalizeError, match="nothing filled scale"):
        DefaultModelLoader().load_model(ModelConfig(str(tmp_path)), build=lambda c: Half())


@pytest.mark.transformers
def test_without_a_build_function_transformers_builds_what_config_json_names(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    saved = LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path)
    model = DefaultModelLoader().load_model(ModelConfig(str(tmp_path)))
    assert type(model) is LlamaForCausalLM
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))
