"""DTensors that are loaded again, or through a loader of the model's own: the same memory, and nothing guessed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers.checkpoints import ar
from helpers.meshes import One, checkpoint, local, mesh_seen_by, spread
from tensorferry import FinalizeError, LoadConfig, ModelConfig, PlanError, Reloader, Report, get_model_loader

S = Shard


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_new_values_come_into_the_same_memory(atomic: bool, device: str, tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = One(spread(torch.zeros(4, 6, device=device), mesh, [S(1)]))
        reloader = Reloader(model)
        reloader.load(checkpoint(tmp_path / "a", weight=ar(4, 6)), atomic=atomic)
        kept: Any = model.weight
        at = kept._local_tensor.data_ptr()
        report = reloader.load(checkpoint(tmp_path / "b", weight=ar(4, 6, start=50)), atomic=atomic, verify=True)
        assert model.weight is kept
        assert kept._local_tensor.data_ptr() == at
        assert torch.equal(local(kept), ar(4, 6, start=50)[:, 3:])
    assert report.bytes_needed == 4 * 3 * 4
    assert "plan" not in report.seconds


def test_an_atomic_load_that_fails_leaves_the_values(tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = One(spread(ar(4, 2, dtype=torch.float16), mesh, [S(0)]))
        with pytest.raises(FinalizeError, match="lost values"):
            Reloader(model).load(checkpoint(tmp_path, weight=ar(4, 2, start=1e6)), atomic=True)
        assert local(model.weight).tolist() == [[4, 5], [6, 7]]


def test_a_model_that_lies_on_the_ranks_otherwise_is_planned_anew(tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = One(spread(torch.zeros(2, 2), mesh, [S(0)]))
        reloader = Reloader(model)
        reloader.load(checkpoint(tmp_path, weight=ar(2, 2)))
        assert local(model.weight).tolist() == [[2, 3]]
        model.weight = nn.Parameter(DTensor.from_local(torch.zeros(1, 2), mesh, [Replicate()]))
        with pytest.raises(PlanError, match=r"expects? \(1, 2\)"):
            reloader.load(tmp_path)


class Doubles(One):
    def process_weights_after_loading(self) -> None:
        with torch.no_grad():
            self.weight.mul_(2)


class Replaces(One):
    def process_weights_after_loading(self) -> None:
        self.weight = nn.Parameter(self.weight.data * 2)


class Flattens(One):
    def process_weights_after_loading(self) -> None:
        self.weight = nn.Parameter(self.weight.data.to_local().flatten())


@pytest.mark.parametrize("kind", [Doubles, Replaces])
@pytest.mark.parametrize("atomic", [False, True])
def test_post_processing_is_done_again_into_the_same_memory(kind: type[One], atomic: bool, tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = kind(spread(torch.zeros(4, 2, device="meta"), mesh, [S(0)]))
        reloader = Reloader(model)
        reloader.load(checkpoint(tmp_path / "a", weight=ar(4, 2)), atomic=atomic)
        kept: Any = model.weight
        at = kept._local_tensor.data_ptr()
        assert local(kept).tolist() == [[8, 10], [12, 14]]
        reloader.load(checkpoint(tmp_path / "b", weight=ar(4, 2, start=10)), atomic=atomic)
        assert model.weight is kept
        assert kept._local_tensor.data_ptr() == at
        assert local(kept).tolist() == [[28, 30], [32, 34]]


def test_what_post_processing_made_something_else_of_is_not_loaded_again(tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = Flattens(spread(torch.zeros(4, 2, device="meta"), mesh, [S(0)]))
        reloader = Reloader(model)
        reloader.load(checkpoint(tmp_path, weight=ar(4, 2)))
        with pytest.raises(PlanError, match="something else of the DTensor weight"):
            reloader.load(tmp_path)
        assert model.weight.tolist() == [4, 5, 6, 7]


class LoadsItself(One):
    """Takes its part of a tensor as its author thinks fit."""

    by_local = True
    forgets = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            target: Any = self.get_parameter(name)
            if self.forgets:
                continue
            if self.by_local:
                target.to_local().copy_(tensor[4:] if target.to_local().shape[0] == 4 else tensor)
            else:
                target.copy_(spread(tensor, target.device_mesh, target.placements))


def by_its_own_loader(model: One, folder: Path) -> Report:
    loader = get_model_loader(LoadConfig())
    loader.load_model(ModelConfig(str(folder)), build=lambda config: model)
    assert loader.report is not None
    return loader.report


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("by_local", [True, False])
def test_a_loader_of_its_own_is_not_traced_but_gets_everything(by_local: bool, device: str, tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = LoadsItself(spread(torch.zeros(8, 2, device=device), mesh, [S(0)]))
        model.by_local = by_local
        report = by_its_own_loader(model, checkpoint(tmp_path, weight=ar(8, 2)))
        assert torch.equal(local(model.weight), ar(8, 2)[4:])
    assert list(report.streamed) == ["weight"]
    assert "fills DTensors (weight)" in report.streamed["weight"]
    assert any("could not be traced: it fills DTensors (weight)" in warning for warning in report.warnings)
    assert report.bytes_needed == 8 * 2 * 4


def test_a_loader_of_its_own_that_writes_nothing_is_found_out(tmp_path: Path) -> None:
    with mesh_seen_by(1, (2,)) as mesh:
        model = LoadsItself(spread(torch.zeros(8, 2), mesh, [S(0)]))
        model.forgets = True
        with pytest.raises(PlanError, match="wrote nothing to it"):
            by_its_own_loader(model, checkpoint(tmp_path, weight=ar(8, 2)))
