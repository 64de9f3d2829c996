"""Where the weights of a vLLM model come from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.checkpoints import write_safetensors
from helpers.fake_vllm import FakeVllm, model_config
from helpers.old_loaders import NanoModel, nano_checkpoint
from helpers.vllm_loading import load
from tensorferry import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return nano_checkpoint(tmp_path)


class Towers(nn.Module):
    """Two parts, one of which lies in a folder of its own."""

    def __init__(self, elsewhere: Path) -> None:
        super().__init__()
        self.text = nn.Parameter(torch.empty(4))
        self.audio = nn.Parameter(torch.empty(4))
        source = SimpleNamespace(model_or_path=str(elsewhere), revision=None, subfolder=None, prefix="tower.")
        self.secondary_weights = [source]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            getattr(self, {"text": "text", "tower.encoder": "audio"}[name]).data.copy_(value)


def test_secondary_sources_of_vllm_are_read_under_their_prefixes(vllm: FakeVllm, tmp_path: Path) -> None:
    for name, tensors in (("a", {"text": torch.ones(4)}), ("b", {"encoder": torch.full((4,), 2.0)})):
        (tmp_path / name).mkdir()
        write_safetensors(tmp_path / name / "model.safetensors", tensors)
    model = Towers(tmp_path / "b")
    load(vllm, tmp_path / "a", model)
    assert (model.text.tolist(), model.audio.tolist()) == ([1.0] * 4, [2.0] * 4)


def test_the_weights_may_lie_elsewhere_than_the_configuration(vllm: FakeVllm, folder: Path, tmp_path: Path) -> None:
    load(vllm, tmp_path / "only-a-configuration", weights=str(folder))


def test_an_address_that_is_not_known_is_refused_in_words(vllm: FakeVllm, folder: Path) -> None:
    config = model_config(folder)
    config.model_weights = "oss://bucket/model"
    with pytest.raises(ConfigError, match="addresses of oss are not known here"):
        vllm.loader().load_weights(NanoModel(), config)


def test_downloading_a_folder_that_is_here_does_nothing(vllm: FakeVllm, folder: Path) -> None:
    vllm.loader().download_model(model_config(folder))
