"""Reported failures of loading through a model loader: caches that outlive a load, lost attributes, ignored options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry.errors import ConfigError, PlanError
from tensorferry.loaders import DefaultModelLoader, LoadConfig, ModelConfig, get_model_loader


def linear(config: ModelConfig) -> nn.Module:
    return nn.Linear(2, 1, bias=False)


def test_life_02_a_second_load_by_the_same_loader_sees_the_new_values(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "model.safetensors", {"weight": ar(1, 2)})
    size = file.stat().st_size
    loader = DefaultModelLoader()
    model = loader.load_model(ModelConfig(str(tmp_path)), build=linear)
    write_safetensors(file, {"weight": ar(1, 2, start=5)})
    assert file.stat().st_size == size
    loader.load_weights(model, ModelConfig(str(tmp_path)))
    assert model.get_parameter("weight").tolist() == [[5, 6]]


class Repacked(nn.Module):
    """Its post-processing puts another parameter in place of the one that was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.weight.weight_loader = self.fill  # type: ignore[attr-defined]

    @staticmethod
    def fill(parameter: nn.Parameter, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            parameter: Any = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)

    def process_weights_after_loading(self) -> None:
        self.weight = nn.Parameter(self.weight.detach().t().contiguous(), requires_grad=False)


@pytest.mark.parametrize("how", ["trace", "stream"])
def test_life_09_a_second_load_works_after_post_processing_replaced_a_parameter(how: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2, 2)})
    loader = DefaultModelLoader(LoadConfig.from_dict({"own_loader": how}))
    model = loader.load_model(ModelConfig(str(tmp_path)), build=lambda c: Repacked())
    first = model.get_parameter("weight").tolist()
    assert first == [[0, 2], [1, 3]]
    loader.load_weights(model, ModelConfig(str(tmp_path)))
    assert model.get_parameter("weight").tolist() == first


def test_run_06_every_tensor_ends_on_the_device_that_was_asked_for(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(1, 2)})

    def on_meta(config: ModelConfig) -> nn.Module:
        assert torch.empty(0).device == torch.device("cpu")
        with torch.device("meta"):
            return linear(config)

    model = DefaultModelLoader(LoadConfig(device="cpu")).load_model(ModelConfig(str(tmp_path)), build=on_meta)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_run_06_an_option_that_has_no_effect_is_an_error(tmp_path: Path) -> None:
    for load_format, option in (("safetensors", "seed"), ("dummy", "pattern")):
        with pytest.raises(ConfigError, match=f"has no option '{option}'"):
            get_model_loader(LoadConfig(load_format=load_format, options={option: 1}))


def test_run_06_a_quantization_that_nobody_does_is_an_error(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(1, 2)})
    with pytest.raises(ConfigError, match="quantization 'awq': models are built unquantized here"):
        DefaultModelLoader().load_model(ModelConfig(str(tmp_path), quantization="awq"))


def test_a_model_is_untouched_when_its_checkpoint_does_not_fit(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(1, 2), "bias": ar(3)})
    model = nn.Linear(2, 1)
    before = {name: p.tolist() for name, p in model.named_parameters()}
    with pytest.raises(PlanError) as refused:
        DefaultModelLoader().load_weights(model, ModelConfig(str(tmp_path)))
    assert not refused.value.touched
    assert {name: p.tolist() for name, p in model.named_parameters()} == before
