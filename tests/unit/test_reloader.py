"""`Reloader`: planned once, in place, what changed is refused, and all or nothing where that is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import tensorferry.api
import tensorferry.reload
from helpers.checkpoints import ar, write_raw_safetensors, write_safetensors
from tensorferry import ConfigError, FinalizeError, PlanError, ReadError, ReadOptions, Reloader
from tensorferry.modules import aside, shadows
from tensorferry.storage.local import LocalStorage
from tensorferry.verify import verify_files


def checkpoint(folder: Path, start: float, **more: torch.Tensor) -> Path:
    write_safetensors(
        folder / "model.safetensors", {"weight": ar(3, 2, start=start), "bias": ar(3, start=start), **more}
    )
    return folder


class Calls:
    """Counts calls of `prepare` in reload."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = tensorferry.api.prepare

        def counting(*given: Any, **options: Any) -> Any:
            self.count += 1
            return original(*given, **options)

        monkeypatch.setattr(tensorferry.reload, "prepare", counting)


@pytest.mark.parametrize("atomic", [False, True])
def test_new_values_come_into_the_memory_that_there_is_by_the_plan_of_the_first_load(
    atomic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, model = Calls(monkeypatch), nn.Linear(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path / "a", 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kept, at = model.weight, model.weight.data_ptr()
    report = reloader.load(checkpoint(tmp_path / "b", 50), atomic=atomic)
    assert model.weight is kept is optimizer.param_groups[0]["params"][0]
    assert model.weight.data_ptr() == at
    assert torch.equal(model.weight, ar(3, 2, start=50))
    assert planned.count == 1
    assert report.bytes_read == 9 * 4
    assert report.source.endswith("b")
    assert "plan" not in report.seconds


def test_a_model_on_meta_is_loaded_for_the_first_time(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path / "a", 0), atomic=True)
    reloader.load(checkpoint(tmp_path / "b", 7))
    assert torch.equal(model.weight, ar(3, 2, start=7))


def test_life_02_a_file_that_was_rewritten_is_read_anew(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path, 0))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        changed = file.read().replace(ar(3, 2).numpy().tobytes(), ar(3, 2, start=70).numpy().tobytes())
        file.seek(0)
        file.write(changed)
    reloader.load(tmp_path)
    assert torch.equal(model.weight, ar(3, 2, start=70))


def test_the_plan_is_used_for_a_file_in_which_tensors_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, model = Calls(monkeypatch), nn.Linear(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path / "a", 0))
    (tmp_path / "b").mkdir()
    bias, weight = ar(3, start=9), ar(3, 2, start=8)
    entries = [("bias", "F32", (3,), bias.numpy().tobytes()), ("weight", "F32", (3, 2), weight.numpy().tobytes())]
    write_raw_safetensors(tmp_path / "b" / "model.safetensors", entries, pad_to=4096)
    reloader.load(tmp_path / "b")
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.bias, bias)
    assert planned.count == 1


def test_another_layout_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path / "a", 0))
    other = {"weight": ar(3, 2, start=9, dtype=torch.bfloat16), "offset": ar(3)}
    write_safetensors(tmp_path / "b" / "model.safetensors", other)
    with pytest.raises(PlanError, match="3 differences") as caught:
        reloader.load(tmp_path / "b")
    assert "weight is BF16 (3, 2), and was F32 (3, 2)" in str(caught.value)
    assert "bias is not there" in str(caught.value)
    assert "offset is new" in str(caught.value)
    assert not caught.value.touched
    assert torch.equal(model.weight, ar(3, 2))


def test_another_layout_is_refused_before_all_of_it_is_read_to_be_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloader = Reloader(nn.Linear(2, 3))
    reloader.load(checkpoint(tmp_path / "a", 0), verify=True)
    verify = mock.Mock(side_effect=verify_files)
    monkeypatch.setattr(tensorferry.reload, "verify_files", verify)
    reloader.load(checkpoint(tmp_path / "b", 1), verify=True)
    assert verify.call_count == 1
    with pytest.raises(PlanError, match="offset is new"):
        reloader.load(checkpoint(tmp_path / "c", 2, offset=ar(3)), verify=True)
    assert verify.call_count == 1


def test_a_model_that_has_changed_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path, 0))
    model.weight = nn.Parameter(torch.zeros(5, 2))
    with pytest.raises(PlanError, match="the model is not what it was when the load was planned: weight"):
        reloader.load(tmp_path)


@pytest.mark.parametrize("atomic", [False, True])
def test_training_mode_is_left_as_it_is(atomic: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
    model[1].eval()
    write_safetensors(tmp_path / "model.safetensors", {"0.weight": ar(3, 2), "0.bias": ar(3)})
    Reloader(model).load(tmp_path, atomic=atomic)
    assert [module.training for module in model.modules()] == [True, True, False]


class _Failing:
    """Has the n-th read of a file fail, after it was opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        original, count = LocalStorage.read_vector, 0

        def read(storage: LocalStorage, path: str, offset: int, outs: Any) -> None:
            nonlocal count
            count += 1
            if count > number:
                raise ReadError(f"{path}: the disk is gone")
            original(storage, path, offset, outs)

        monkeypatch.setattr(LocalStorage, "read_vector", read)


def large(folder: Path, start: float) -> Path:
    write_safetensors(folder / "model.safetensors", {f"{i}.weight": ar(64, 64, start=start) for i in range(8)})
    return folder


def large_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))


SMALL_READS = ReadOptions(max_staging=16384, max_read=16384, threads=1, direct="never")


def test_a_load_that_fails_half_way_leaves_old_values_where_it_is_atomic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = large_model()
    reloader = Reloader(model)
    reloader.load(large(tmp_path / "a", 0))
    large(tmp_path / "b", 9)
    opened = tensorferry.open_checkpoint(tmp_path / "b", options=SMALL_READS)
    _Failing(monkeypatch, 4)
    with opened, pytest.raises(ReadError) as caught:
        reloader.load(opened, atomic=True)
    assert not caught.value.touched
    assert all(torch.equal(layer.weight, ar(64, 64)) for layer in model)


def test_a_load_that_fails_half_way_says_that_it_has_begun_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = large_model()
    reloader = Reloader(model)
    reloader.load(large(tmp_path / "a", 0))
    large(tmp_path / "b", 9)
    opened = tensorferry.open_checkpoint(tmp_path / "b", options=SMALL_READS)
    _Failing(monkeypatch, 4)
    with opened, pytest.raises(ReadError) as caught:
        reloader.load(opened)
    assert caught.value.touched
    assert torch.equal(model[0].weight, ar(64, 64, start=9))
    assert torch.equal(model[7].weight, ar(64, 64))


def test_values_that_a_narrower_type_cannot_hold_leave_old_ones_where_it_is_atomic(tmp_path: Path) -> None:
    model = nn.Linear(2, 3).half()
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path / "a", 0))
    checkpoint(tmp_path / "b", 1e6)
    with pytest.raises(FinalizeError, match="cannot hold them") as caught:
        reloader.load(tmp_path / "b", atomic=True)
    assert not caught.value.touched
    assert torch.equal(model.weight, ar(3, 2).half())


def test_old_values_stay_until_all_new_ones_are_there(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path / "a", 0))
    seen: list[torch.Tensor] = []

    def look(storage: LocalStorage) -> None:
        seen.append(model.weight.detach().clone())

    with mock.patch.object(LocalStorage, "check_unchanged", look):
        reloader.load(checkpoint(tmp_path / "b", 5), atomic=True)
    assert torch.equal(seen[0], ar(3, 2))
    assert torch.equal(model.weight, ar(3, 2, start=5))


def test_a_swap_that_is_interrupted_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path / "a", 0))
    original, calls = aside.overwrite, 0

    def interrupted(old: torch.Tensor, new: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        original(old, new)

    monkeypatch.setattr(shadows, "overwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reloader.load(checkpoint(tmp_path / "b", 5), atomic=True)
    assert torch.equal(model.weight, ar(3, 2, start=5))
    assert torch.equal(model.bias, ar(3, start=5))


def test_what_has_no_room_beside_the_old_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path / "a", 0))
    monkeypatch.setattr(shadows, "free_memory", lambda device: 35)
    checkpoint(tmp_path / "b", 5)
    with pytest.raises(ConfigError, match="takes 36 B more on cpu, and 35 B are free") as caught:
        reloader.load(tmp_path / "b", atomic=True)
    assert not caught.value.touched
    monkeypatch.setattr(shadows, "free_memory", lambda device: 36)
    reloader.load(tmp_path / "b", atomic=True)
    assert torch.equal(model.weight, ar(3, 2, start=5))


def test_free_memory_is_known_here() -> None:
    free = shadows.free_memory(torch.device("cpu"))
    assert free is None or 0 < free < 1 << 50


def test_tensors_that_are_tied_are_compared_again(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2, bias=False)
            self.other = nn.Linear(2, 2, bias=False)
            self.other.weight = self.one.weight

    model = Tied()
    reloader = Reloader(model)
    write_safetensors(tmp_path / "a" / "model.safetensors", {"one.weight": ar(2, 2), "other.weight": ar(2, 2)})
    write_safetensors(tmp_path / "b" / "model.safetensors", {"one.weight": ar(2, 2), "other.weight": ar(2, 2, start=4)})
    reloader.load(tmp_path / "a")
    assert model.one.weight is model.other.weight
    report = reloader.load(tmp_path / "b")
    assert torch.equal(model.other.weight, ar(2, 2, start=4))
    assert any("untied" in warning for warning in report.warnings)


class Doubled(nn.Linear):
    """Puts a new parameter of the same form in the place of its weight."""

    def process_weights_after_loading(self) -> None:
        self.weight = nn.Parameter(self.weight * 2, requires_grad=False)


class Packed(nn.Linear):
    """Keeps its weight as small integers beside a scale, as kernels want it, and a view that they use."""

    fails = False

    def process_weights_after_loading(self) -> None:
        if self.fails:
            raise RuntimeError("no kernel")
        scale = self.weight.detach().abs().max() / 127
        self.register_buffer("scale", scale.reshape(1))
        self.weight = nn.Parameter((self.weight / scale).round().to(torch.int8), requires_grad=False)
        self.flat = self.weight.view(-1)


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("kind", [Doubled, Packed])
def test_what_post_processing_makes_comes_into_the_tensors_of_the_first_time(
    kind: type[nn.Linear], atomic: bool, tmp_path: Path
) -> None:
    model: Any = nn.ModuleList([kind(2, 3), nn.Linear(2, 3)])
    fresh = kind(2, 3)
    reloader = Reloader(model)
    values = {f"{i}.{name}": value for i in range(2) for name, value in (("weight", ar(3, 2)), ("bias", ar(3)))}
    write_safetensors(tmp_path / "a" / "model.safetensors", values)
    write_safetensors(tmp_path / "b" / "model.safetensors", {name: value + 5 for name, value in values.items()})
    reloader.load(tmp_path / "a")
    before = dict(model[0].state_dict(keep_vars=True)) | {"flat": getattr(model[0], "flat", None)}
    report = reloader.load(tmp_path / "b", atomic=atomic)
    Reloader(fresh).load(checkpoint(tmp_path / "c", 5))
    after = dict(model[0].state_dict(keep_vars=True)) | {"flat": getattr(model[0], "flat", None)}
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(torch.equal(after[name], tensor) for name, tensor in fresh.state_dict().items())
    assert torch.equal(model[1].weight, ar(3, 2, start=5))
    assert report.post_processed == ("0",)
    assert report.warnings == ()


@pytest.mark.parametrize("atomic", [False, True])
def test_a_hook_that_fails_leaves_the_tensors_that_were_there(atomic: bool, tmp_path: Path) -> None:
    model: Any = Packed(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path / "a", 0))
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    model.fails = True
    with pytest.raises(RuntimeError, match="no kernel"):
        reloader.load(checkpoint(tmp_path / "b", 5), atomic=atomic)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
    model.fails = False
    reloader.load(tmp_path / "b", atomic=atomic)
    assert model.scale.item() == pytest.approx(10 / 127)


def test_a_model_that_was_post_processed_before_can_be_reloaded(tmp_path: Path) -> None:
    model: Any = Packed(2, 3)
    tensorferry.load(model, checkpoint(tmp_path / "a", 0))
    Reloader(model).load(checkpoint(tmp_path / "b", 5))
    assert model.weight.dtype == torch.int8
    assert model.scale.item() == pytest.approx(10 / 127)


def test_what_post_processing_replaced_and_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    class Zeros(nn.Linear):
        def process_weights_after_loading(self) -> None:
            self.bias = nn.Parameter(self.bias.to(torch.int8), requires_grad=False)

    model = Zeros(2, 3)
    strict = tensorferry.Strictness(may_miss=("bias",))
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(3, 2)})
    reloader = Reloader(model, strict=strict)
    reloader.load(tmp_path)
    processed = model.bias
    with pytest.raises(PlanError, match="post-processing has replaced bias, and the checkpoint does not hold"):
        reloader.load(tmp_path)
    assert model.bias is processed


def test_another_form_the_second_time_is_told(tmp_path: Path) -> None:
    class Growing(nn.Linear):
        times = 0

        def process_weights_after_loading(self) -> None:
            self.times += 1
            self.register_buffer("table", torch.zeros(self.times))

    model = Growing(2, 3)
    reloader = Reloader(model)
    reloader.load(checkpoint(tmp_path, 0))
    report = reloader.load(tmp_path)
    assert [warning for warning in report.warnings if "made table in another form" in warning]


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'load_format'"):
        Reloader(nn.Linear(2, 3), load_fromat="pt")  # type: ignore[call-arg]
