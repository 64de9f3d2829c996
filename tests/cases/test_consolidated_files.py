"""Reported failures of Meta's and Mistral's own layout beside or instead of transformers' shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorferry
from helpers.checkpoints import ar, write_safetensors
from helpers.command_line import CommandLine
from helpers.consolidated_models import (
    meta_params,
    mistral_params,
    native,
    tiny_llama,
    tiny_mistral,
    write_consolidated,
    write_parts,
)
from helpers.reading import watching_opens
from helpers.tiny_transformers import equal_bits
from tensorferry.errors import LocateError
from tensorferry.formats.opening import open_files


def both(folder: Path) -> tuple[Path, Any]:
    """Write a model into one folder in both layouts, as its publishers do."""
    model = tiny_mistral()
    params = mistral_params(model.config, sliding_window=5)
    write_consolidated(folder / "m", native(model, folder), params, 2)
    model.save_pretrained(folder / "m", max_shard_size="20KB")
    return folder / "m", model


@pytest.mark.transformers
def test_disc_04_shards_are_read_unless_the_consolidated_files_are_asked_for(tmp_path: Path) -> None:
    folder, _ = both(tmp_path)
    with watching_opens() as seen:
        tensorferry.load_model(folder)
    assert not [path for path in seen if "consolidated" in Path(path).name]
    with watching_opens() as seen:
        tensorferry.load_model(folder, load_format="mistral")
    assert not [path for path in seen if Path(path).name.startswith("model-0")]


@pytest.mark.transformers
def test_arch_06_both_layouts_make_one_target(tmp_path: Path) -> None:
    folder, model = both(tmp_path)
    shards = tensorferry.load_model(folder).state_dict()
    consolidated = tensorferry.load_model(folder, load_format="mistral").state_dict()
    assert list(shards) == list(consolidated) == list(model.state_dict())
    assert all(equal_bits(shards[name], consolidated[name]) for name in shards)


@pytest.mark.transformers
def test_arch_06_any_number_of_parts_makes_the_same_target(tmp_path: Path) -> None:
    model = tiny_llama()
    tensors = native(model, tmp_path)
    state = model.state_dict()
    for count in (1, 2, 4):
        folder = write_parts(tmp_path / str(count), tensors, meta_params(model.config), count)
        ours = tensorferry.load_model(folder).state_dict()
        assert [name for name in state if not equal_bits(state[name], ours[name])] == []


def test_disc_04_parts_beside_shards_are_not_opened(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ar(2)})
    torch.save({"layers.0.attention.wq.weight": ar(2, 2)}, tmp_path / "consolidated.00.pth")
    with watching_opens() as seen, open_files(tmp_path) as opened:
        assert list(opened.catalogue) == ["a"]
    assert not [path for path in seen if path.endswith(".pth")]
    with open_files(tmp_path, load_format="mistral") as opened:
        assert list(opened.catalogue) == ["layers.0.attention.wq.weight"]


def test_disc_21_format_mistral_without_a_consolidated_file_of_either_kind(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", {"a": ar(2)})
    with pytest.raises(LocateError, match=r"consolidated safetensors, consolidated \.pth.*model-00001-of-00001"):
        open_files(tmp_path, load_format="mistral")


@pytest.mark.transformers
def test_disc_21_inspect_shows_joined_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama()
    folder = write_parts(tmp_path / "m", native(model, tmp_path), meta_params(model.config), 2)
    done = CommandLine(capsys)("inspect", folder)
    assert "2 files, 21 tensors" in done.out
    assert "layers.{0,1}.feed_forward.w2.weight" in done.out
    assert "F32 [32, 48]" in done.out
