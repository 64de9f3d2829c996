"""Devices that can be had, and torch's default dtype, which threads take turns with."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorferry
from helpers.checkpoints import ar, write_safetensors
from tensorferry import api
from tensorferry.errors import ConfigError
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader
from tensorferry.modules.surroundings import building, named_device, usable_device


def test_no_device_is_the_cpu() -> None:
    assert usable_device(None) == usable_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu", "", "CPU", [], 1.5])
def test_a_device_that_torch_does_not_know_is_refused(device: object) -> None:
    with pytest.raises(ConfigError, match="nothing can be put there"):
        named_device(device)  # type: ignore[arg-type]


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="device 'xla': nothing can be put there"):
        usable_device("xla")


def test_meta_is_no_place_for_values() -> None:
    with pytest.raises(ConfigError, match="tensors there have no values"):
        usable_device("meta")


def test_the_default_dtype_is_put_back() -> None:
    with building(torch.bfloat16):
        assert torch.get_default_dtype() is torch.bfloat16
        with building(None):
            assert torch.get_default_dtype() is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32


def test_it_is_put_back_after_an_error() -> None:
    with pytest.raises(KeyError), building(torch.float64):
        raise KeyError
    assert torch.get_default_dtype() is torch.float32


def test_threads_that_build_with_different_dtypes_wait_for_each_other() -> None:
    seen: list[bool] = []
    entered, let_go = threading.Event(), threading.Event()

    def first() -> None:
        with building(torch.bfloat16):
            entered.set()
            let_go.wait(10)
            seen.append(torch.get_default_dtype() is torch.bfloat16)

    def second() -> None:
        with building(torch.float64):
            seen.append(torch.get_default_dtype() is torch.float64)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    entered.wait(10)
    threads[1].start()
    let_go.set()
    for thread in threads:
        thread.join()
    assert seen == [True, True]
    assert torch.get_default_dtype() is torch.float32


def test_no_device_leaves_tensors_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def settled(model: nn.Module, device: object) -> torch.device:
        asked.append(device)
        return torch.device("cpu")

    monkeypatch.setattr(api, "device_for", settled)
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(3, 2), "bias": ar(3)})
    tensorferry.load(nn.Linear(2, 3), tmp_path)
    tensorferry.Reloader(nn.Linear(2, 3)).load(tmp_path)
    get_model_loader(LoadConfig()).load_weights(nn.Linear(2, 3), ModelConfig(str(tmp_path)))
    assert len(asked) >= 3  # every time as it was asked for: for a model on a GPU, the CPU would be refused
    assert set(asked) == {None}
