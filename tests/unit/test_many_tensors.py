"""Checkpoints of very many small tensors: what a load takes is what Python does for each of them."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from safetensors.torch import save_file
from torch import nn

import tensorferry
from tensorferry import ReadOptions, api
from tensorferry.errors import ReadError

OURS = str(Path(tensorferry.__file__).parent)


class Many(nn.Module):
    def __init__(self, layers: int, device: str = "cpu") -> None:
        super().__init__()
        for n in range(layers):
            self.add_module(f"l{n}", nn.Linear(4, 2, device=device))


def saved(folder: Path, layers: int) -> Path:
    folder.mkdir()
    save_file(Many(layers).state_dict(), folder / "model.safetensors")
    return folder


def calls(model: nn.Module, path: Path) -> int:
    """Return how many functions of ours, and steps of generators, a load calls in all of its threads."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        tensorferry.load(model, path, options=ReadOptions(threads=1))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count


@pytest.mark.parametrize(("device", "most"), [("cpu", 75), ("meta", 80)])
def test_a_tensor_more_costs_a_bounded_number_of_calls(tmp_path: Path, device: str, most: int) -> None:
    few, many = saved(tmp_path / "few", 100), saved(tmp_path / "many", 300)
    calls(Many(100, device), few)  # what is imported or remembered at first
    more = calls(Many(300, device), many) - calls(Many(100, device), few)
    assert more / 400 <= most


class Watching:
    """Progress that says whether the collector is on while bytes come."""

    def __init__(self, fails: bool = False) -> None:
        self.seen: set[bool] = set()
        self.fails = fails

    def start(self, total: int, what: str) -> None: ...

    def advance(self, nbytes: int) -> None:
        self.seen.add(gc.isenabled())
        if self.fails:
            raise ReadError("as if")

    def finish(self) -> None: ...


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_pauses_for_a_load_of_few_bytes_and_is_on_again_however_that_ends(
    tmp_path: Path, fails: bool
) -> None:
    progress = Watching(fails)
    try:
        tensorferry.load(Many(2), saved(tmp_path / "m", 2), progress=progress)
    except ReadError:
        assert fails
    assert progress.seen == {False}
    assert gc.isenabled()


def test_the_collector_is_on_while_many_bytes_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_LITTLE", 0)
    progress = Watching()
    tensorferry.load(Many(2), saved(tmp_path / "m", 2), progress=progress)
    assert progress.seen == {True}


def test_small_tensors_on_meta_get_memory_of_their_own(tmp_path: Path) -> None:
    model = Many(50, "meta")
    tensorferry.load(model, saved(tmp_path / "m", 50))
    for tensor in model.state_dict().values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert len({tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}) == 100
    assert not torch.stack([layer.bias for layer in model.children()]).isnan().any()  # type: ignore[misc]
