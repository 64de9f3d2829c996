"""Reported failures of loading again: stale values, and what post-processing takes away from the second load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry import load, open_checkpoint


def test_life_02_a_file_that_was_rewritten_is_read_anew(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2, 2), "bias": ar(2)})
    model = nn.Linear(2, 2)
    load(model, tmp_path)
    size = path.stat().st_size
    changed = path.read_bytes().replace(ar(2, 2).numpy().tobytes(), ar(2, 2, start=70).numpy().tobytes())
    with path.open("r+b") as file:  # in place: the same inode, the same size
        file.write(changed)
    assert path.stat().st_size == size
    load(model, tmp_path)
    assert model.weight.tolist() == [[70, 71], [72, 73]]
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("weight"), ar(2, 2, start=70))


class Packed(nn.Linear):
    """Puts a new parameter in the place of its weight after loading, as kernels want it: not less than twice."""

    def process_weights_after_loading(self) -> None:
        self.weight = nn.Parameter(self.weight * 2, requires_grad=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_life_09_attributes_outlive_post_processing_and_a_second_load_is_equal(tmp_path: Path, device: str) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2, 2), "bias": ar(2)})
    with torch.device(device):
        model: Any = Packed(2, 2)
    model.weight.weight_loader = loader = object()
    for _ in range(2):
        report = load(model, tmp_path)
        assert torch.equal(model.weight, ar(2, 2) * 2)
        assert model.weight.weight_loader is loader
        assert report.post_processed == ("",)
