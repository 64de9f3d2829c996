"""The loader of GGUF files, by its load_format and as one of several under auto."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.gguf_models import tiny_llama, write_gguf
from tensorferry.core.rules import Place
from tensorferry.core.ruleset import RuleSet
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.loaders.gguf import GGUFModelLoader


@pytest.mark.transformers
@pytest.mark.parametrize("load_format", ["gguf", "auto"])
def test_a_file_makes_the_model_that_it_describes(load_format: str, tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path)
    loaded = get_model_loader(LoadConfig(load_format=load_format)).load_model(ModelConfig(str(file)))
    state = loaded.state_dict()
    assert [n for n, t in model.state_dict().items() if not torch.equal(state[n], t)] == []


def test_load_format_gguf_has_a_loader_of_its_own() -> None:
    assert isinstance(get_model_loader(LoadConfig(load_format="gguf")), GGUFModelLoader)


class Small(nn.Module):
    weight_rules = RuleSet(Place("blk.0.attn_q.weight", "q"))

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.zeros(2, 32))


def test_a_model_with_rules_takes_the_names_of_gguf_and_numbers_out_of_blocks(tmp_path: Path) -> None:
    values = torch.arange(-32.0, 32.0).view(2, 32)
    tensors = {"blk.0.attn_q.weight": values}
    write_gguf(tmp_path / "m.gguf", "any", {}, tensors, packed={"weight": "Q8_0"})
    loader = get_model_loader(LoadConfig(load_format="gguf"))
    model = loader.load_model(ModelConfig(str(tmp_path)), build=lambda _: Small())
    assert torch.allclose(model.get_parameter("q"), values, atol=0.15)
