"""Models with their own ``load_weights(iterable)`` out of Meta's and Mistral's files: names of transformers, traced."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from helpers.consolidated_models import meta_params, mistral_params, native, tiny_llama, write_consolidated, write_parts
from helpers.fused_llama import FusedLlama
from helpers.tiny_transformers import equal_bits
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize("own_loader", ["trace", "stream"])
@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_an_engine_gets_its_part(
    own_loader: Literal["trace", "stream"], parts: int, rank: int, tmp_path: Path
) -> None:
    model = tiny_llama()
    tensors, folder = native(model, tmp_path), tmp_path / "m"
    if parts:
        write_parts(folder, tensors, meta_params(model.config), parts)
    else:
        write_consolidated(folder, tensors, mistral_params(model.config))
    loader = get_model_loader(LoadConfig(own_loader=own_loader))
    got = loader.load_model(ModelConfig(str(folder)), build=lambda _: FusedLlama(model.config, 2, rank)).state_dict()
    expected = FusedLlama(model.config, 2, rank)
    with torch.no_grad():
        expected.load_weights(model.state_dict().items())
    assert [name for name, tensor in expected.state_dict().items() if not equal_bits(got[name], tensor)] == []
    assert loader.report is not None
    assert bool(loader.report.streamed) == (own_loader == "stream")
