"""SmolLM2 through Tensorizer files: what the library writes we load, and what we write the library reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import tensorferry
from helpers.tensorizer_library import read_by_library, write_by_library
from helpers.tiny_transformers import equal_bits, logits
from helpers.weights import variant
from tensorferry.formats.tensorizer_write import write_tensorizer
from tensorferry.formats.writing import NewTensor
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.storage.reading import read_bytes

pytestmark = [pytest.mark.weights, pytest.mark.transformers]


def test_a_module_that_the_library_wrote_gives_the_same_logits(tmp_path: Path) -> None:
    model = tensorferry.load_model(variant("bf16"))
    shutil.copy(variant("bf16") / "config.json", tmp_path)
    write_by_library(tmp_path / "model.tensors", model)
    loader = get_model_loader(LoadConfig(load_format="tensorizer"))
    made = loader.load_model(ModelConfig(str(tmp_path)))
    assert [n for n, t in model.state_dict().items() if not equal_bits(made.state_dict()[n], t)] == []
    assert torch.equal(logits(made), logits(model))
    assert loader.report is not None
    assert loader.report.verified.startswith("hashes in model.tensors verified")


def test_the_library_reads_what_we_write_of_it(tmp_path: Path) -> None:
    with tensorferry.open_checkpoint(variant("bf16")) as checkpoint:
        entries = checkpoint.catalogue

        def new(name: str) -> NewTensor:
            entry, span = entries[name], entries[name].span
            assert span is not None
            return NewTensor(entry.dtype, entry.shape, (read_bytes(checkpoint.storage, *part) for part in [span]))

        write_tensorizer(tmp_path / "model.tensors", {name: new(name) for name in entries})
        read = read_by_library(tmp_path / "model.tensors")
        assert [name for name, tensor in checkpoint.tensors() if not equal_bits(read[name], tensor)] == []
