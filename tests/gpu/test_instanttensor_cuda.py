"""InstantTensor for real: it reads into the memory of NVIDIA GPUs only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader

pytestmark = pytest.mark.gpu
pytest.importorskip("instanttensor", reason="the extra instanttensor is not installed")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_model_is_filled_over_the_gpu(device: str, tmp_path: Path) -> None:
    weights = {"weight": ar(300, 200), "bias": ar(300, start=5)}
    write_safetensors(tmp_path / "model.safetensors", weights | {"spare": ar(7)})
    loader = get_model_loader(LoadConfig(load_format="instanttensor", device=device))
    model = loader.load_model(ModelConfig(str(tmp_path)), lambda config: nn.Linear(200, 300))
    state = model.state_dict()
    assert {t.device.type for t in state.values()} == {device}
    assert all(torch.equal(state[name].cpu(), weights[name]) for name in weights)
    assert loader.report is not None
    assert loader.report.executor == "InstantTensorExecutor"
