"""States from after post-processing: what is tied stays tied, and names that no tensor can have are refused first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorferry
from helpers.checkpoints import ar, write_safetensors
from helpers.sharded_models import load_rank
from tensorferry import ModelConfig, ParallelConfig
from tensorferry.errors import ConfigError, CorruptFile
from tensorferry.loaders import LoadConfig, get_model_loader
from tensorferry.loaders.saving import save_sharded_state

MANIFEST = "tensorferry-sharded-state-pp-0-tp-0-ep-0.json"


class Packs(nn.Module):
    """Doubles its weight into a packed tensor with two more names, one of them the weight's; a buffer has two, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2))
        self.packed: nn.Parameter | None = None

    def process_weights_after_loading(self) -> None:
        doubled = nn.Parameter(self.weight.detach().flatten() * 2)
        self.packed, self.weight = doubled, doubled
        self.register_parameter("again", doubled)
        zero = torch.tensor([5.0])
        self.register_buffer("zero", zero)
        self.register_buffer("point", zero)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = Packs()


def saved(folder: Path) -> Net:
    write_safetensors(folder.parent / "source" / "model.safetensors", {"proj.weight": ar(2, 2)})
    net = Net()
    get_model_loader(LoadConfig()).load_model(ModelConfig(str(folder.parent / "source")), lambda _: net)
    save_sharded_state(net, folder)
    return net


def test_what_post_processing_has_tied_is_tied_after_the_load_and_saved_alike(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "state").state_dict()
    for generation in ("state", "again", "thrice"):
        net = Net()
        load_rank(tmp_path / generation, net)
        found = net.state_dict()
        assert {name: t.tolist() for name, t in found.items()} == {name: t.tolist() for name, t in wanted.items()}
        assert net.proj.packed is net.proj.weight is net.proj.again
        assert net.proj.zero is net.proj.point
        save_sharded_state(net, tmp_path / {"state": "again", "again": "thrice", "thrice": "last"}[generation])
    manifests = [json.loads((tmp_path / folder / MANIFEST).read_text()) for folder in ("state", "last")]
    assert manifests[0]["aliases"] == manifests[1]["aliases"]
    assert manifests[0]["changed"] == manifests[1]["changed"]


class Doubles(nn.Linear):
    """Doubles its weight where it is."""

    processing_keeps_layout = True

    def process_weights_after_loading(self) -> None:
        self.weight.data.mul_(2)


def test_what_was_post_processed_is_neither_converted_nor_processed_again(tmp_path: Path) -> None:
    model = Doubles(2, 2, bias=False)
    save_sharded_state(model, tmp_path / "state")
    with pytest.raises(ConfigError, match="saved after post-processing, which no other checkpoint can say"):
        tensorferry.convert(tmp_path / "state", tmp_path / "new", to="sharded_state", load_format="sharded_state")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]
    with pytest.raises(ConfigError, match="saved after post-processing, which the model would repeat"):
        tensorferry.load(Doubles(2, 2, bias=False), tmp_path / "state", load_format="sharded_state")
    plain = nn.Linear(2, 2, bias=False)
    tensorferry.load(plain, tmp_path / "state", load_format="sharded_state")
    assert torch.equal(plain.weight, model.weight)


def refused(folder: Path, change: Mapping[str, Any], error: type[Exception], words: str) -> None:
    """Assert that the state is refused with its manifest changed, and that the model stays as it was."""
    data = json.loads((folder / MANIFEST).read_text())
    data.update(change)
    (folder / MANIFEST).write_text(json.dumps(data))
    net = Net()
    before = dict(net.named_parameters())
    with pytest.raises(error, match=words) as caught:
        load_rank(folder, net, parallel=ParallelConfig())
    assert not getattr(caught.value, "touched", False)
    assert all(dict(net.named_parameters())[name] is p for name, p in before.items())
    assert net.proj.packed is None


@pytest.mark.parametrize(
    "name", ["proj._parameters", "proj.training", "proj.forward", "proj.", "proj._modules", "proj.__class__"]
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_name_that_no_tensor_can_have_is_refused_before_the_model_is_touched(
    tmp_path: Path, name: str, tied: bool
) -> None:
    saved(tmp_path / "state")
    data = json.loads((tmp_path / "state" / MANIFEST).read_text())
    change = (
        {"aliases": {**data["aliases"], name: "proj.again"}}
        if tied
        else {
            "tensors": {**data["tensors"], name: {"dtype": "F32", "shape": [1]}},
            "changed": {**data["changed"], name: None},
        }
    )
    refused(tmp_path / "state", change, ConfigError, "no tensor can be called so in Packs")


def test_an_alias_in_a_module_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "state")
    refused(tmp_path / "state", {"aliases": {"other.x": "proj.again"}}, ConfigError, "other.x: the model lacks its mod")


@pytest.mark.parametrize("processed", [None, [], ["other"]])
def test_changes_without_a_module_that_was_processed_contradict_themselves(
    tmp_path: Path, processed: list[str] | None
) -> None:
    saved(tmp_path / "state")
    refused(tmp_path / "state", {"post_processed": processed}, CorruptFile, "no module around it was processed")


def test_a_name_of_nothing_but_dots_is_refused_at_once(tmp_path: Path) -> None:
    saved(tmp_path / "state")
    refused(tmp_path / "state", {"unset": ["." * 500_000]}, CorruptFile, "no module around it was processed")
