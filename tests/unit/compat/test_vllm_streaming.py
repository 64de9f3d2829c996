"""What no plan can fill in a vLLM model goes through the model's own loader."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.checkpoints import write_safetensors
from helpers.fake_vllm import FakeVllm
from helpers.old_loaders import NanoModel, nano_checkpoint, poisoned
from helpers.vllm_loading import filled_by_itself, load
from tensorferry import PlanError, ReadError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return nano_checkpoint(tmp_path)


class Doubling(nn.Module):
    """Computes one of its parameters, which no plan can do."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.empty(4))
        self.doubled = nn.Parameter(torch.empty(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            getattr(self, name).data.copy_(value * 2 if name == "doubled" else value)


def test_what_is_no_copy_is_streamed_and_told(vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"plain": torch.ones(4), "doubled": torch.ones(4)})
    model = Doubling()
    report = load(vllm, tmp_path, model).report
    assert list(report.streamed) == ["doubled"]
    assert model.doubled.tolist() == [2.0] * 4
    assert "streamed through the model's own loader" in caplog.text


def test_streaming_everything_can_be_asked_for(vllm: FakeVllm, folder: Path) -> None:
    model = poisoned(NanoModel())
    report = load(vllm, folder, model, own_loader="stream").report
    assert len(report.streamed) == report.parameters
    for name, expected in filled_by_itself(folder).items():
        assert torch.equal(model.state_dict()[name], expected), name


class Online(nn.Module):
    """A layer that has no memory until its own loader has made it."""

    def __init__(self, *, says: set[str]) -> None:
        super().__init__()
        self.says = says
        self.quant_method = SimpleNamespace(uses_meta_device=True)
        self.weight = nn.Parameter(torch.empty(4, device="meta"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for _, value in weights:
            self.weight = nn.Parameter(value.clone())
        return self.says


def test_a_model_that_is_quantized_while_it_loads_is_streamed(vllm: FakeVllm, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": torch.ones(4)})
    model = Online(says={"weight"})
    report = load(vllm, tmp_path, model).report
    assert list(report.streamed) == ["weight"]
    assert model.weight.tolist() == [1.0] * 4


def test_what_such_a_model_does_not_say_that_it_loaded_is_missing(vllm: FakeVllm, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"other": torch.ones(4)})
    with pytest.raises(PlanError, match="missing: weight") as caught:
        load(vllm, tmp_path, Online(says=set()))
    assert caught.value.touched


class Failing:
    """What ranks agree on, where another one has failed before this one has read anything."""

    def together(self, *, touches: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def exchanged(self, told: str) -> list[str]:
        return [told]

    def watch(self) -> None:
        raise ReadError("rank 1 of 2: the disk is broken")


@pytest.mark.parametrize("own_loader", ["trace", "stream"])
def test_a_failure_of_another_rank_ends_the_load_before_anything_is_streamed(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_loader: str
) -> None:
    from tensorferry.compat.vllm import engine

    write_safetensors(tmp_path / "model.safetensors", {"plain": torch.ones(4), "doubled": torch.ones(4)})
    monkeypatch.setattr(engine, "agreement", lambda model_config: Failing())
    model = Doubling()
    poisoned(model)
    with pytest.raises(ReadError, match="the disk is broken"):
        load(vllm, tmp_path, model, own_loader=own_loader)
    assert model.doubled.tolist() == [77.0] * 4


def test_a_failure_of_another_rank_ends_the_load_of_a_model_that_is_quantized_meanwhile(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorferry.compat.vllm import engine

    write_safetensors(tmp_path / "model.safetensors", {"weight": torch.ones(4)})
    monkeypatch.setattr(engine, "agreement", lambda model_config: Failing())
    model = Online(says={"weight"})
    with pytest.raises(ReadError, match="the disk is broken") as caught:
        load(vllm, tmp_path, model)
    assert model.weight.is_meta
    assert caught.value.touched  # its loader may have quantized layers by then
