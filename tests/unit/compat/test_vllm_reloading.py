"""Loading a vLLM model again: what it is offered, and what is read for that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.fake_vllm import FakeVllm, model_config
from helpers.old_loaders import NanoModel, nano_checkpoint, poisoned
from helpers.vllm_loading import filled_by_itself, load, rewrite
from tensorferry import PlanError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return nano_checkpoint(tmp_path)


def reloaded(vllm: FakeVllm, folder: Path, model: nn.Module, at: Path) -> dict[str, torch.Tensor]:
    loader = load(vllm, folder, model)
    return dict(loader.get_all_weights(model_config(at), model))


def test_a_reload_offers_every_entry_and_reads_what_the_plan_took(vllm: FakeVllm, folder: Path) -> None:
    offered = reloaded(vllm, folder, poisoned(NanoModel(2, 1)), folder)
    stored = load_file(folder / "model.safetensors")
    assert offered.keys() == stored.keys()
    q = "layers.0.q_proj.weight"
    assert torch.equal(offered[q][16:], stored[q][16:])
    assert not offered[q][:16].any()


def test_a_model_that_is_loaded_again_has_the_new_values(vllm: FakeVllm, folder: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    tensors = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, new / "model.safetensors")
    model = poisoned(NanoModel(2, 1))
    model.load_weights(reloaded(vllm, folder, model, new).items())  # type: ignore[operator]
    for name, expected in filled_by_itself(new, 2, 1).items():
        assert torch.equal(model.state_dict()[name], expected), name


def test_a_checkpoint_that_lacks_what_the_plan_took_is_refused_before_a_reload_begins(
    vllm: FakeVllm, folder: Path
) -> None:
    model = poisoned(NanoModel())
    loader = load(vllm, folder, model)
    rewrite(folder, norm__weight=None)
    with pytest.raises(PlanError, match=r"missing: norm\.weight"):
        loader.get_all_weights(model_config(folder), model)


def test_a_model_that_was_filled_otherwise_gets_everything_in_a_reload(vllm: FakeVllm, folder: Path) -> None:
    offered = dict(vllm.loader().get_all_weights(model_config(folder), NanoModel(2, 1)))
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(offered[name], value), name
