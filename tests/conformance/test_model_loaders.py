"""What every model loader keeps to. Subclass `ModelLoaderConformance` to hold a loader of your own to it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.third_party import need
from tensorferry.errors import ConfigError
from tensorferry.loaders import BaseModelLoader, LoadConfig, ModelConfig, get_model_loader
from tensorferry.report import Report


class Block(nn.Module):
    """Writes down when it was post-processed, and whether its values were there."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.log = log

    def process_weights_after_loading(self) -> None:
        assert not self.proj.weight.is_meta
        self.log.append("block")


class Model(nn.Module):
    """A tied head, a persistent buffer, a computed one, and post-processing on two levels."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.block = Block(log)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.log = log

    def derive_buffers(self, device: torch.device) -> None:
        self.table = torch.arange(2.0, device=device)

    def process_weights_after_loading(self) -> None:
        self.log.append("model")


WEIGHTS = {
    "embed.weight": ar(6, 4),
    "block.proj.weight": ar(4, 4, start=100),
    "block.proj.bias": ar(4, start=200),
    "steps": ar(3, dtype=torch.int64),
}
"""What fills `Model`."""


class ModelLoaderConformance(ABC):
    """Give `load_format` and `write`; override `options` where the loader needs some, and `values` if it invents them.

    The tests build `Model` on the CPU and on meta, load it, and look at the model and the report.
    """

    load_format: str
    options: Mapping[str, Any] = MappingProxyType({})
    values: dict[str, torch.Tensor] | None = WEIGHTS

    @abstractmethod
    def write(self, folder: Path) -> str:
        """Write `WEIGHTS` into `folder` as the loader reads them, and return what to call the model."""

    @pytest.fixture
    def model_config(self, tmp_path: Path) -> ModelConfig:
        return ModelConfig(self.write(tmp_path))

    def loader(self, **settings: Any) -> BaseModelLoader:
        return get_model_loader(
            LoadConfig.from_dict({"load_format": self.load_format, "options": self.options} | settings)
        )

    def loaded(self, model_config: ModelConfig, *, meta: bool = False) -> tuple[Model, BaseModelLoader]:
        loader = self.loader()

        def build(config: ModelConfig) -> nn.Module:
            with torch.device("meta" if meta else "cpu"):
                return Model([])

        model = loader.load_model(model_config, build)
        assert isinstance(model, Model)
        return model, loader

    def test_every_value_is_there(self, model_config: ModelConfig) -> None:
        model, _ = self.loaded(model_config)
        if self.values is not None:
            state = model.state_dict()
            assert {name: state[name].tolist() for name in self.values} == {
                n: t.tolist() for n, t in self.values.items()
            }

    def test_a_model_on_meta_is_filled_just_the_same(self, model_config: ModelConfig) -> None:
        on_meta, on_cpu = self.loaded(model_config, meta=True)[0], self.loaded(model_config)[0]
        assert not any(t.is_meta for t in (*on_meta.parameters(), *on_meta.buffers()))
        for (name, one), other in zip(on_meta.state_dict().items(), on_cpu.state_dict().values(), strict=True):
            assert torch.equal(one, other), name
        assert on_meta.table.tolist() == [0, 1]

    def test_loading_twice_gives_equal_values(self, model_config: ModelConfig) -> None:
        one, other = (self.loaded(model_config)[0].state_dict() for _ in range(2))
        assert all(torch.equal(one[name], other[name]) for name in one)

    def test_ties_are_kept(self, model_config: ModelConfig) -> None:
        for meta in (False, True):
            model, _ = self.loaded(model_config, meta=meta)
            assert model.head.weight is model.embed.weight

    def test_post_processing_runs_once_children_first_and_then_the_model_is_in_eval_mode(
        self, model_config: ModelConfig
    ) -> None:
        model, loader = self.loaded(model_config)
        assert model.log == ["block", "model"]
        assert not any(module.training for module in model.modules())
        assert loader.report is not None
        assert sorted(loader.report.post_processed) == ["", "block"]

    def test_the_model_is_built_once_in_its_dtype_on_the_device(self, model_config: ModelConfig) -> None:
        built: list[Any] = []

        def build(config: ModelConfig) -> nn.Module:
            built.append((config, torch.get_default_dtype(), torch.empty(0).device.type))
            return Model([])

        config = ModelConfig(model_config.model, dtype="float64")
        model = self.loader().load_model(config, build)
        assert built == [(config, torch.float64, "cpu")]
        assert model.get_parameter("embed.weight").dtype == torch.float64
        assert torch.get_default_dtype() == torch.float32

    def test_the_report_is_an_account_of_the_load(self, model_config: ModelConfig) -> None:
        _, loader = self.loaded(model_config)
        report = loader.report
        assert isinstance(report, Report)
        assert report.parameters == len(WEIGHTS)
        assert report.ties == {"head.weight": "embed.weight"}
        assert {"initialize", "load"} <= set(report.seconds)
        assert json.loads(report.to_json())["format"] == report.format

    def test_parameters_need_no_gradient_bookkeeping_afterwards(self, model_config: ModelConfig) -> None:
        model, _ = self.loaded(model_config)
        assert all(p.grad_fn is None for p in model.parameters())
        assert model.embed.weight.requires_grad

    def test_an_option_that_the_loader_does_not_have_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="has no option 'no_such_option'"):
            self.loader(options={"no_such_option": 1})

    def test_downloading_what_is_here_already_does_nothing(self, model_config: ModelConfig, tmp_path: Path) -> None:
        before = sorted(tmp_path.rglob("*"))
        self.loader().download_model(model_config)
        assert sorted(tmp_path.rglob("*")) == before


class TestSafetensors(ModelLoaderConformance):
    load_format = "safetensors"

    def write(self, folder: Path) -> str:
        write_safetensors(folder / "model.safetensors", WEIGHTS)
        return str(folder)


class TestTorchFiles(ModelLoaderConformance):
    load_format = "pt"

    def write(self, folder: Path) -> str:
        torch.save(WEIGHTS, folder / "pytorch_model.bin")
        return str(folder)


class TestDummy(ModelLoaderConformance):
    load_format = "dummy"
    values = None

    def write(self, folder: Path) -> str:
        return str(folder)


class TestShardedState(ModelLoaderConformance):
    load_format = "sharded_state"
    options: Mapping[str, Any] = MappingProxyType({"post_processed": False})

    def write(self, folder: Path) -> str:
        write_safetensors(folder / "model-rank-0-part-0.safetensors", WEIGHTS)
        return str(folder)


class TestFastsafetensors(TestSafetensors):
    load_format = "fastsafetensors"

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        need("fastsafetensors")


class TestRunaiStreamer(TestSafetensors):
    load_format = "runai_streamer"

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        need("runai_streamer")


class TestNpcache(ModelLoaderConformance):
    load_format = "npcache"

    def write(self, folder: Path) -> str:
        torch.save(WEIGHTS, folder / "pytorch_model.bin")
        return str(folder)
