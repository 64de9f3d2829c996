"""Reported failures of loading GGUF files into models. The names of tests begin with the number of the case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorferry
from helpers.gguf_models import checkpoint_of, interleaved, metadata_of, tiny_llama, translated, write_gguf
from helpers.tiny_transformers import tiny

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_gguf_08_without_output_the_head_has_the_storage_of_the_embedding(tmp_path: Path) -> None:
    file, _ = tiny_llama(tmp_path, changes={"tie_word_embeddings": True})
    model: Any = tensorferry.load_model(file)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_gguf_08_with_output_the_head_is_its_own(tmp_path: Path) -> None:
    file, _ = tiny_llama(tmp_path)
    model: Any = tensorferry.load_model(file)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_gguf_09_rope_freqs_are_reported_and_no_tensor_of_the_model(tmp_path: Path) -> None:
    file, _ = tiny_llama(tmp_path, extra={"rope_freqs.weight": torch.ones(4)})
    model, report = tensorferry.load_model(file, return_report=True)
    assert "rotary frequencies" in report.dropped["rope_freqs.weight"]
    assert report.unexpected == ()
    assert not any("rope_freqs" in name for name in model.state_dict())


def test_gguf_11_weights_load_without_a_tokenizer(tmp_path: Path) -> None:
    file, model = tiny_llama(tmp_path)
    assert b"tokenizer." not in file.read_bytes()[:4096]
    ours: Any = tensorferry.load_model(file)
    assert torch.equal(ours.model.norm.weight, model.model.norm.weight)


def test_gguf_11_a_vocabulary_is_no_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "vocab.gguf", "llama", {"tokenizer.ggml.tokens": ["a", "b"]}, {})
    with pytest.raises(tensorferry.PlanError, match=r"no tensors \(vocabulary only\?\)"):
        tensorferry.load_model(file)


def test_a_split_file_loads_from_any_of_its_parts(tmp_path: Path) -> None:
    model = tiny("Llama")
    tensors = list(interleaved(translated(checkpoint_of(model, tmp_path)), 4, 2).items())
    metadata = metadata_of("llama", model.config)
    for part, some in enumerate((tensors[:7], tensors[7:])):
        keys = {"split.no": part, "split.count": 2, "split.tensors.count": len(tensors)}
        path = tmp_path / f"m-{part + 1:05d}-of-00002.gguf"
        write_gguf(path, "llama", {**(metadata if part == 0 else {}), **keys}, dict(some))
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        state = tensorferry.load_model(tmp_path / name).state_dict()
        assert [n for n, t in model.state_dict().items() if not torch.equal(state[n], t)] == []


class RowParallel(torch.nn.Module):
    """The columns of one rank of `size`, packed or not."""

    def __init__(self, columns: int, rank: int, size: int, *, packed: bool) -> None:
        super().__init__()
        part, shape = columns // size, (2, columns // size)
        weight = torch.nn.Parameter(torch.empty(shape))
        self.weight = tensorferry.PackedParameter.empty("Q8_0", shape, device="meta") if packed else weight
        window = tensorferry.Region((2, columns), tensorferry.Box((0, rank * part), (2, (rank + 1) * part)))
        self.slot = tensorferry.Slot(tensorferry.Region.whole(shape), (2, columns), window)

    def tensor_slots(self) -> dict[str, dict[str, tensorferry.Slot]]:
        return {"weight": {"": self.slot}}


def q8_0_file(folder: Path, columns: int) -> Path:
    values = torch.linspace(-1, 1, 2 * columns).view(2, columns)
    return write_gguf(folder / "m.gguf", "llama", {}, {"weight": values}, packed={"weight": "Q8_0"})


def test_gguf_12_each_of_two_ranks_takes_one_block_of_a_row(tmp_path: Path) -> None:
    file = q8_0_file(tmp_path, 64)
    with tensorferry.open_checkpoint(file) as checkpoint:
        stored = checkpoint.read("weight")
    for rank in (0, 1):
        model: Any = RowParallel(64, rank, 2, packed=True)
        assert tensorferry.plan(model, file).bytes_needed == 2 * 34
        tensorferry.load(model, file)
        assert torch.equal(model.weight, stored[:, 34 * rank : 34 * (rank + 1)])


def test_gguf_12_a_block_is_not_cut_but_its_numbers_are(tmp_path: Path) -> None:
    file = q8_0_file(tmp_path, 32)
    with pytest.raises(tensorferry.ConfigError, match="rows of Q8_0 are whole blocks of 32 elements"):
        RowParallel(32, 1, 2, packed=True)
    model: Any = RowParallel(32, 1, 2, packed=False)
    tensorferry.load(model, file)
    with tensorferry.open_checkpoint(file) as checkpoint:
        stored = checkpoint.read("weight", packed=True)
    assert isinstance(stored, tensorferry.PackedTensor)
    assert torch.equal(model.weight, stored.dequantize()[:, 16:])
