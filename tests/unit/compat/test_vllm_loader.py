"""The loader that vLLM gets, with stand-ins for vLLM: what it fills, refuses and says."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.fake_vllm import FakeVllm, model_config
from helpers.old_loaders import NanoModel, nano_checkpoint, poisoned
from helpers.vllm_loading import filled_by_itself, is_untouched, load, rewrite
from tensorferry import LocateError, PlanError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return nano_checkpoint(tmp_path)


def test_the_package_says_that_it_is_a_plug_in_of_vllm() -> None:
    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == "tensorferry")
    assert point.value == "tensorferry.compat.vllm:register"


def test_importing_the_plug_in_does_not_import_vllm() -> None:
    import tensorferry.compat.vllm

    assert tensorferry.compat.vllm.LOAD_FORMAT == "tensorferry"
    assert "tensorferry.compat.vllm.engine" not in sys.modules


def test_registering_twice_registers_once(vllm: FakeVllm) -> None:
    from tensorferry.compat.vllm import register

    register()
    assert len(vllm.loaders["tensorferry"]) == 1


def test_a_model_is_filled_as_by_its_own_loader(vllm: FakeVllm, folder: Path) -> None:
    model = poisoned(NanoModel())
    load(vllm, folder, model)
    for name, expected in filled_by_itself(folder).items():
        assert torch.equal(model.state_dict()[name], expected), name


def test_a_rank_of_two_needs_about_half_of_the_bytes(vllm: FakeVllm, folder: Path) -> None:
    whole, half = (load(vllm, folder, poisoned(NanoModel(size, 0))).report.bytes_needed for size in (1, 2))
    assert half < 0.52 * whole


def test_hooks_are_left_to_vllm(vllm: FakeVllm, folder: Path) -> None:
    model, ran = poisoned(NanoModel()), []
    model.norm.process_weights_after_loading = lambda: ran.append("hook")  # type: ignore[union-attr]
    assert load(vllm, folder, model).report.post_processed == ()
    assert ran == []


def test_vllm_processes_weights_that_are_there_already(vllm: FakeVllm, folder: Path) -> None:
    loader, seen = vllm.loader(), []
    loader.process = lambda model: seen.append(float(model.norm.weight.detach()[0]))
    config = SimpleNamespace(build=lambda: poisoned(NanoModel()), parallel_config=SimpleNamespace(data_parallel_size=1))
    model = loader.load_model(config, model_config(folder))
    assert seen == [float(model.norm.weight.detach()[0])] != [77.0]
    assert not model.training


def test_the_log_of_vllm_says_what_was_done_in_one_line(
    vllm: FakeVllm, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm")
    load(vllm, folder)
    told = [r.getMessage() for r in caplog.records if r.name == "vllm.tensorferry"]
    (line,) = (text for text in told if "parameters from" in text)
    assert str(folder) in line
    assert "read" in line


def test_what_we_warn_of_is_in_the_log_of_vllm_and_only_there(
    vllm: FakeVllm, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(folder, norm__weight=None)
    load(vllm, folder, strictness={"missing": "warn"})
    warned = [(r.name, r.getMessage()) for r in caplog.records if "missing: norm.weight" in r.getMessage()]
    assert [name for name, _ in warned] == ["vllm.tensorferry"]


def test_a_missing_tensor_stops_the_load_before_anything_is_touched(vllm: FakeVllm, folder: Path) -> None:
    rewrite(folder, layers__1__q_proj__weight=None)
    model = poisoned(NanoModel())
    with pytest.raises(PlanError, match=r"layers\.1\.qkv_proj\.weight.*fills 256 of its 768") as caught:
        load(vllm, folder, model)
    assert not caught.value.touched
    assert is_untouched(model)


def test_a_renamed_tensor_at_which_the_loader_fails_stops_the_load_before_anything_is_touched(
    vllm: FakeVllm, folder: Path
) -> None:
    rewrite(folder, layers__1__norm__weight="layers.1.nrom.weight")
    model = poisoned(NanoModel())
    with pytest.raises(PlanError, match="the model was not touched") as caught:
        load(vllm, folder, model)
    assert is_untouched(model)
    found = {(p.kind.value, p.subject): p for p in caught.value.problems}
    assert set(found) == {("unexpected", "layers.1.nrom.weight"), ("missing", "layers.1.norm.weight")}
    assert "KeyError" in found["unexpected", "layers.1.nrom.weight"].detail
    assert found["missing", "layers.1.norm.weight"].near == ("layers.1.nrom.weight",)
    assert "own_loader" in str(caught.value)


def test_a_tensor_of_another_shape_stops_the_load_before_anything_is_touched(vllm: FakeVllm, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "norm.weight": torch.zeros(17)}, folder / "model.safetensors")
    model = poisoned(NanoModel())
    with pytest.raises(PlanError, match=r"norm\.weight.*AssertionError"):
        load(vllm, folder, model)
    assert is_untouched(model)


def test_a_folder_without_weights_is_said_to_be_that(vllm: FakeVllm, tmp_path: Path) -> None:
    with pytest.raises(LocateError):
        load(vllm, tmp_path)
