"""A model that is no folder here comes from the Hub: what is needed of it, into the cache that is configured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("huggingface_hub")

from helpers.checkpoints import ar, write_safetensors
from helpers.hubserver import HubServer, hub_for_tests
from tensorferry.errors import LocateError
from tensorferry.loaders import DefaultModelLoader, LoadConfig, ModelConfig, get_model_loader

NAME = "owner/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_for_tests(monkeypatch, tmp_path / "home") as server:
        write_safetensors(tmp_path / "repo" / "model.safetensors", {"weight": ar(1, 2)})
        torch.save({"weight": ar(1, 2)}, tmp_path / "repo" / "pytorch_model.bin")
        (tmp_path / "repo" / "config.json").write_text("{}")
        server.add(NAME, tmp_path / "repo")
        yield server


def linear(config: Any) -> nn.Module:
    return nn.Linear(2, 1, bias=False)


def test_only_what_is_loaded_is_fetched(hub: HubServer) -> None:
    model = DefaultModelLoader().load_model(ModelConfig(NAME), build=linear)
    assert model.get_parameter("weight").tolist() == [[0, 1]]
    assert sorted(hub.resolved()) == ["config.json", "model.safetensors"]


def test_downloading_first_lets_a_model_load_offline_from_the_folder_that_is_configured(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DefaultModelLoader(LoadConfig(download_dir=str(tmp_path / "elsewhere")))
    loader.download_model(ModelConfig(NAME))
    before = len(hub.log)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert loader.load_model(ModelConfig(NAME), build=linear).get_parameter("weight").tolist() == [[0, 1]]
    assert len(hub.log) == before
    with pytest.raises(LocateError, match="is not in the cache"):
        DefaultModelLoader().load_model(ModelConfig(NAME), build=linear)


def test_a_secondary_source_is_fetched_too(hub: HubServer, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "tower" / "model.safetensors", {"weight": ar(2, 2, start=5)})
    hub.add("owner/tower", tmp_path / "tower")

    class Two(nn.Module):
        secondary_weights = (DefaultModelLoader.Source("owner/tower", prefix="tower."),)

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, 2))
            self.tower = nn.Linear(2, 2, bias=False)

    model = DefaultModelLoader().load_model(ModelConfig(NAME), build=lambda c: Two())
    assert model.get_parameter("tower.weight").tolist() == [[5, 6], [7, 8]]


def test_ignored_files_are_not_fetched(hub: HubServer) -> None:
    loader = DefaultModelLoader(LoadConfig(ignore_patterns=["*.safetensors", "*.json"]))
    loader.load_model(ModelConfig(NAME), build=linear)
    assert hub.resolved() == ["pytorch_model.bin"]


def test_stand_in_values_need_no_weights(hub: HubServer) -> None:
    loader = get_model_loader(LoadConfig(load_format="dummy"))
    loader.download_model(ModelConfig(NAME))
    assert hub.resolved() == ["config.json"]
