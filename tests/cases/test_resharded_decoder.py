"""A decoder on parallel layers, saved by four ranks: read by four, by two or by one, it equals the direct load."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.tiny_transformers import saved
from tensorferry import LoadConfig, ModelConfig, ParallelConfig, save_sharded_state
from tensorferry.loaders import get_model_loader

pytestmark = pytest.mark.transformers

EXAMPLE: dict[str, Any] = runpy.run_path(str(Path(__file__).resolve().parent.parent.parent / "examples" / "llama.py"))


def direct(folder: Path, parallel: ParallelConfig) -> nn.Module:
    model: nn.Module = EXAMPLE["load_llama"](folder, parallel)
    return model


def restored(state: Path, parallel: ParallelConfig, like: nn.Module) -> nn.Module:
    loader = get_model_loader(LoadConfig(load_format="sharded_state", parallel=parallel))

    def build(_: ModelConfig) -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = EXAMPLE["Llama"](like.config, parallel)
        return model

    return loader.load_model(ModelConfig(str(state)), build)


@pytest.mark.parametrize("name", ["Llama", "tied Llama", "Qwen2", "Mixtral"])
def test_a_state_of_four_ranks_is_read_by_four_two_and_one(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "hf")
    for parallel in ParallelConfig.every_rank(tp_size=4):
        save_sharded_state(direct(folder, parallel), tmp_path / "state", parallel=parallel)
    for size in (4, 2, 1):
        for parallel in ParallelConfig.every_rank(tp_size=size):
            expected = direct(folder, parallel)
            found = restored(tmp_path / "state", parallel, expected)
            assert found.state_dict().keys() == expected.state_dict().keys()
            for key, tensor in expected.state_dict().items():
                assert torch.equal(found.state_dict()[key], tensor), key


def test_experts_of_four_ranks_are_dealt_anew_to_two(tmp_path: Path) -> None:
    folder = saved("Mixtral", tmp_path / "hf")
    for parallel in ParallelConfig.every_rank(tp_size=4, ep_size=4):
        save_sharded_state(direct(folder, parallel), tmp_path / "state", parallel=parallel)
    for parallel in ParallelConfig.every_rank(tp_size=2, ep_size=2):
        expected = direct(folder, parallel)
        found = restored(tmp_path / "state", parallel, expected)
        for key, tensor in expected.state_dict().items():
            assert torch.equal(found.state_dict()[key], tensor), key
