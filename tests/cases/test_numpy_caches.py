"""Reported failures with NumPy caches: bfloat16 that cannot be saved, caches of another state of the checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from helpers.checkpoints import ar
from tensorferry.loaders import LoadConfig, ModelConfig, build_npcache, get_model_loader


def values(folder: Path) -> torch.Tensor:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))})
    loader = get_model_loader(LoadConfig(load_format="npcache"))
    loaded = loader.load_model(ModelConfig(str(folder)), build=lambda _: model)
    return loaded.get_parameter("w").detach()


def test_life_08_bfloat16_keeps_its_bits_and_its_size(tmp_path: Path) -> None:
    weights = torch.tensor([1.0, -0.0, float("nan")], dtype=torch.bfloat16)
    weights.view(torch.int16)[2] = 0x7FA1  # a NaN with a payload, which no detour over numbers would keep
    torch.save({"w": weights}, tmp_path / "pytorch_model.bin")
    assert values(tmp_path).view(torch.int16).tolist() == weights.view(torch.int16).tolist()
    bits = np.load(tmp_path / "np" / "w").view(np.uint16)
    assert bits.tolist() == [0x3F80, 0x8000, 0x7FA1]
    assert (tmp_path / "np" / "w").stat().st_size == 128 + 6


def test_life_08_a_checkpoint_that_changed_is_noticed(tmp_path: Path) -> None:
    torch.save({"w": ar(3, dtype=torch.bfloat16)}, tmp_path / "pytorch_model.bin")
    assert values(tmp_path).tolist() == [0, 1, 2]
    torch.save({"w": ar(3, start=5, dtype=torch.bfloat16)}, tmp_path / "pytorch_model.bin")
    assert values(tmp_path).tolist() == [5, 6, 7]


def test_life_08_a_truncated_cache_is_built_anew(tmp_path: Path) -> None:
    torch.save({"w": ar(3, dtype=torch.bfloat16)}, tmp_path / "pytorch_model.bin")
    build_npcache(tmp_path)
    os.truncate(tmp_path / "np" / "w", 130)
    assert values(tmp_path).tolist() == [0, 1, 2]
    assert (tmp_path / "np" / "w").stat().st_size == 134
