"""Loading a vLLM model again: what it is offered, and what is read for that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.fake_vllm import FakeVllm, model_config
from helpers.old_loaders import NanoModel, nano_checkpoint, poisoned
from helpers.vllm_loading import filled_by_itself, load, rewrite
from tensorferry import LoadConfig, PlanError, open_checkpoint
from tensorferry.compat.vllm.reloading import Needs, restored
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Made, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.transforms import Transpose
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape


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


class Calibrated(nn.Module):
    """A layer with a buffer that checkpoints may have, and a loader that takes what it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.register_buffer("scale", torch.ones(1))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = self.state_dict()
        for name, value in weights:
            if name in held:
                held[name].copy_(value)


def test_what_only_the_new_checkpoint_has_is_read_whole(vllm: FakeVllm, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    save_file({"weight": torch.ones(2, 3), "else": torch.ones(1)}, old / "model.safetensors")
    tensors = {"weight": torch.full((2, 3), 2.0), "else": torch.full((1,), 2.0), "scale": torch.tensor([3.0])}
    save_file(tensors, new / "model.safetensors")
    model = Calibrated()
    loader = load(vllm, old, model, strictness={"may_miss": ["scale"]})
    offered = dict(loader.get_all_weights(model_config(new), model))
    assert {name: value.flatten()[0].item() for name, value in offered.items()} == {"weight": 2, "scale": 3, "else": 0}


def test_a_reload_from_elsewhere_comes_before_the_option_that_says_where_weights_are(
    vllm: FakeVllm, folder: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    new.mkdir()
    tensors = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, new / "model.safetensors")
    served, model = tmp_path / "served", poisoned(NanoModel())
    served.mkdir()
    loader = load(vllm, served, model, weights=str(folder))
    again = dict(loader.get_all_weights(model_config(served), model))
    moved = dict(loader.get_all_weights(model_config(new), model))
    assert torch.equal(again["norm.weight"] + 1, moved["norm.weight"])
    assert torch.equal(moved["norm.weight"], tensors["norm.weight"])


def test_an_entry_that_is_made_of_another_has_its_values_in_a_reload(folder: Path) -> None:
    name = "layers.0.q_proj.weight"
    with open_checkpoint(folder) as checkpoint:
        entry = checkpoint.catalogue[name]
        turned = TensorEntry(name, entry.dtype, entry.shape[::-1], (), made=Made((entry,), Transpose((1, 0))))
        part = Region(turned.shape, Box.whole(turned.shape))
        offered = offered_of(checkpoint, turned, Needs({name: turned.shape}, {name: (part,)}, frozenset()))
    assert torch.equal(offered, load_file(folder / "model.safetensors")[name].T)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E8M0", "F4", "BOOL"])
def test_what_is_not_needed_is_zero_in_every_type(folder: Path, dtype: str) -> None:
    with open_checkpoint(folder) as checkpoint:
        entry = replace(checkpoint.catalogue["norm.weight"], dtype=DTYPES[dtype], shape=(300, 256))
        offered = offered_of(checkpoint, entry, Needs({}, {}, frozenset({"norm.weight"})))
    assert offered.shape == torch_shape(DTYPES[dtype], (300, 256))
    assert offered.dtype == torch_dtype(DTYPES[dtype])
    assert not offered.view(torch.uint8).any()


def offered_of(checkpoint: Any, entry: TensorEntry, needs: Needs) -> torch.Tensor:
    """Return what a reload offers of `entry`, as the only one of a checkpoint that is otherwise as `checkpoint`."""
    one = SimpleNamespace(catalogue={entry.name: entry}, storage=checkpoint.storage, options=checkpoint.options)
    ((_, tensor),) = restored(one, needs, LoadConfig())  # type: ignore[arg-type]
    return tensor
