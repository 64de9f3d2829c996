"""InstantTensor reads into NVIDIA GPUs only; here a stand-in with its signature does, and its absence is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar
from helpers.third_party import (
    MIB,
    filled,
    pretend_instanttensor,
    write_sharded,
)
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.target import TargetTensor
from tensorferry.errors import ConfigError
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.loaders.third_party.instanttensor import InstantTensorExecutor, InstantTensorOptions

F32 = DTYPES["F32"]

SIX = {f"layers.{i}.weight": ar(5, 4, start=100 * i) for i in range(6)}


class Model(nn.Module):
    """Two matrices of which the second is tied, and a vector."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight


WEIGHTS = {"embed.weight": ar(6, 4), "head.bias": ar(6, start=50)}


def test_without_an_nvidia_gpu_instanttensor_is_refused_before_a_model_is_built() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU and a torch that is built for CUDA, and finds none"):
        get_model_loader(LoadConfig(load_format="instanttensor")).load_model(
            ModelConfig("."), lambda config: pytest.fail("it was built")
        )


def test_instanttensor_is_asked_for_exact_names_of_the_files_that_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pretend_instanttensor(monkeypatch)
    write_sharded(tmp_path, SIX, 3)
    executor = InstantTensorExecutor(torch.device("cuda:0"), InstantTensorOptions(buffer_size=MIB))
    found = filled(executor, tmp_path, TargetTensor.plain("layers.1.weight", F32, (5, 4)))
    assert torch.equal(found["layers.1.weight"], SIX["layers.1.weight"])
    (call,) = calls
    assert [Path(file).name for file in call.pop("files")] == ["model-00002-of-00003.safetensors"]
    assert call == {"buffer_size": MIB, "copy": True, "device": torch.device("cuda:0")}


def test_a_model_is_loaded_through_instanttensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_instanttensor(monkeypatch)
    write_sharded(tmp_path, WEIGHTS, 2)
    loader = get_model_loader(LoadConfig(load_format="instanttensor"))
    model = loader.load_model(ModelConfig(str(tmp_path)), Model)
    assert torch.equal(model.get_parameter("head.weight"), WEIGHTS["embed.weight"])
    assert loader.report is not None
    assert loader.report.executor == "InstantTensorExecutor"


def test_an_old_instanttensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_instanttensor(monkeypatch, version="0.2.1")
    with pytest.raises(ConfigError, match=r"instanttensor 0\.2\.1 is installed, and 0\.2\.2 or newer is needed"):
        get_model_loader(LoadConfig(load_format="instanttensor")).load_model(ModelConfig("."), Model)
