"""The loader through NumPy caches: what it builds, when it builds it anew, and what happens where it cannot."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from helpers.measuring import measured
from helpers.npy_bytes import write_vllm_cache
from tensorferry import LocateError, PlanError, ReadError, UnsafeFile, open_checkpoint
from tensorferry.config import ReadOptions
from tensorferry.formats import npcache_write
from tensorferry.formats.opening import open_files
from tensorferry.formats.writing import write_chunks
from tensorferry.loaders import LoadConfig, ModelConfig, build_npcache, get_model_loader, npcache
from tensorferry.report import Report

WEIGHTS = {
    "weight": ar(3, 4).t(),  # which torch saves with its strides
    "brain": ar(5, start=300, dtype=torch.bfloat16),
    "eight": ar(4, dtype=torch.float8_e4m3fn),
    "steps": ar(2, dtype=torch.int64),
}


WRITE = "tensorferry.formats.npcache_write"


class Model(nn.Module):
    def __init__(self, weights: dict[str, torch.Tensor] = WEIGHTS) -> None:
        super().__init__()
        for name, tensor in weights.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor), requires_grad=False))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    return tmp_path


def loaded(path: Path, model: Callable[[], nn.Module] = Model, **config: Any) -> tuple[nn.Module, Report]:
    loader = get_model_loader(LoadConfig(load_format="npcache", **config))
    made = loader.load_model(ModelConfig(str(path)), build=lambda _: model())
    assert loader.report is not None
    return made, loader.report


def assert_equal(model: nn.Module, weights: dict[str, torch.Tensor] = WEIGHTS) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.dtype == weights[name].dtype
        assert torch.equal(parameter.contiguous().view(torch.uint8), weights[name].contiguous().view(torch.uint8))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_ino, p.read_bytes()) for p in (folder / "np").iterdir()}


def test_the_first_load_builds_it_and_the_next_one_reads_it(folder: Path) -> None:
    model, report = loaded(folder)
    assert_equal(model)
    assert report.format == "npcache"
    assert sorted(report.files) == ["np/brain", "np/eight", "np/steps", "np/weight"]
    assert report.warnings == ()
    before = contents(folder)
    model, _ = loaded(folder)
    assert_equal(model)
    assert contents(folder) == before


def test_only_what_the_plan_needs_is_read_of_it(folder: Path) -> None:
    build_npcache(folder)
    _, report = loaded(folder, lambda: Model({"brain": WEIGHTS["brain"]}))
    assert report.bytes_read == report.bytes_needed == 10
    assert sorted(report.unexpected) == ["eight", "steps", "weight"]


def test_it_is_planned_strictly_like_any_other(folder: Path) -> None:
    with pytest.raises(PlanError, match="missing: other") as refusal:
        loaded(folder, lambda: Model({"other": ar(2)}))
    assert not refusal.value.touched


def change_the_source(folder: Path) -> None:
    torch.save({**WEIGHTS, "brain": WEIGHTS["brain"] + 4}, folder / "pytorch_model.bin")


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / "np" / name, 100)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "np" / name).unlink()


def overwrite(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: void((folder / "np" / name).write_bytes(data))


def other_type(folder: Path) -> None:
    with (folder / "np" / "brain").open("wb") as out:
        np.save(out, np.zeros(5, np.uint16))


def void(_: object) -> None:
    """Drop a result where a function must have none."""


DAMAGE: dict[str, Callable[[Path], None]] = {
    "the source changed": change_the_source,
    "the source was touched": lambda folder: os.utime(folder / "pytorch_model.bin"),
    "a file was cut": cut("weight"),
    "the list was cut": overwrite("weight_names.json", b'["weight'),
    "the record was cut": overwrite("tensorferry.json", b'{"format": '),
    "the record is empty": overwrite("tensorferry.json", b""),
    "a file is absent": remove("brain"),
    "the list is absent": remove("weight_names.json"),
    "a file has another type": other_type,
    "a file is something else": overwrite("steps", b"<!DOCTYPE html>"),
    "a name leads out": overwrite("weight_names.json", b'["../pytorch_model.bin"]'),
    "a file is too long": overwrite("steps", b"\x93NUMPY" + bytes(200)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_believed_is_built_anew(folder: Path, damage: str) -> None:
    build_npcache(folder)
    DAMAGE[damage](folder)
    model, report = loaded(folder)
    weights = {**WEIGHTS, "brain": WEIGHTS["brain"] + 4} if damage == "the source changed" else WEIGHTS
    assert_equal(model, weights)
    assert report.format == "npcache"
    with open_checkpoint(folder, load_format="npcache") as checkpoint:
        assert checkpoint.warnings == ()
    assert sorted(p.name for p in folder.iterdir()) == [".np.lock", "np", "pytorch_model.bin"]


def test_one_that_vllm_made_is_used_as_it_is(tmp_path: Path) -> None:
    weights = {"a": ar(2, 3), "b": ar(4, dtype=torch.int64)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    os.utime(tmp_path / "pytorch_model.bin", (1, 1))
    write_vllm_cache(tmp_path, {name: tensor.numpy() for name, tensor in weights.items()})
    model, report = loaded(tmp_path, lambda: Model(weights))
    assert_equal(model, weights)
    assert "has no tensorferry.json" in report.warnings[0]
    assert not (tmp_path / "np" / "tensorferry.json").exists()


def test_one_that_vllm_left_half_written_is_built_anew(folder: Path) -> None:
    place = folder / "np"
    place.mkdir()
    with (place / "weight").open("wb") as out:
        np.save(out, WEIGHTS["weight"].numpy())
    (place / "brain").touch()  # where NumPy was asked to save bfloat16, and vLLM ended
    model, _ = loaded(folder)
    assert_equal(model)


def test_a_folder_of_that_name_that_is_no_cache_is_left_alone(folder: Path) -> None:
    (folder / "np").mkdir()
    (folder / "np" / "notes.txt").write_text("mine")
    with pytest.raises(UnsafeFile, match=r"notes\.txt is no part of a NumPy cache.*move it away"):
        loaded(folder)
    assert (folder / "np" / "notes.txt").read_text() == "mine"


def test_safetensors_are_refused_with_the_reason(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})
    with pytest.raises(LocateError, match=r"A NumPy cache is for torch files.*would gain nothing"):
        loaded(tmp_path)
    with pytest.raises(LocateError, match="would gain nothing"):
        build_npcache(tmp_path)


def denied(number: int) -> Callable[..., Any]:
    def act(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return act


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_where_it_cannot_be_written_the_files_themselves_are_loaded_and_it_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(npcache, "one_builder", denied(number))
    model, report = loaded(folder)
    assert_equal(model)
    assert report.format == "torch"
    (warning,) = report.warnings
    assert f"the NumPy cache {folder / 'np'} could not be written ({os.strerror(number)})" in warning
    assert (
        "so pytorch_model.bin is loaded itself: make the folder writable, or leave load_format npcache out" in warning
    )


def test_a_disk_that_is_full_in_the_middle_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{WRITE}.write_chunks", denied(errno.ENOSPC))
    model, report = loaded(folder)
    assert_equal(model)
    assert "No space left on device" in report.warnings[0]
    assert sorted(p.name for p in folder.iterdir()) == [".np.lock", "pytorch_model.bin"]
    with pytest.raises(OSError, match="No space left"):
        build_npcache(folder)


def test_a_source_that_changes_while_it_is_copied_is_not_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(*arguments: Any) -> None:
        os.utime(folder / "pytorch_model.bin")
        write_chunks(*arguments)

    monkeypatch.setattr(f"{WRITE}.write_chunks", changing)
    with pytest.raises(ReadError, match=r"pytorch_model\.bin.*changed while it was in use"):
        loaded(folder)
    assert not (folder / "np").exists()


@pytest.mark.parametrize("after", range(len(WEIGHTS)))
def test_a_build_that_was_killed_at_any_tensor_is_no_cache_and_the_next_one_is_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    written: list[object] = []

    def killed(*arguments: Any) -> None:
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(arguments)
        write_chunks(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(f"{WRITE}.write_chunks", killed)
        patched.setattr(f"{WRITE}.shutil.rmtree", lambda *_, **__: None)  # as if nothing had time to tidy up
        with pytest.raises(KeyboardInterrupt):
            build_npcache(folder)
    assert not (folder / "np").exists()
    assert len(list(folder.glob(".np.*.part"))) == 1
    with pytest.raises(LocateError, match="no finished NumPy cache"):
        open_checkpoint(folder, load_format="npcache")
    assert_equal(loaded(folder)[0])
    assert not list(folder.glob(".np.*.part"))


def test_a_build_that_was_killed_between_two_renames_is_made_good(folder: Path) -> None:
    build_npcache(folder)
    (folder / ".np.0123456789abcdef.part").mkdir()
    (folder / "np").rename(folder / ".np.0123456789abcdef.part" / "old.1")
    assert_equal(loaded(folder)[0])


def in_threads(count: int, act: Callable[[], object]) -> list[Exception]:
    faults: list[Exception] = []
    together = threading.Barrier(count)

    def run() -> None:
        together.wait()
        try:
            act()
        except Exception as error:  # noqa: BLE001 - for the test to look at
            faults.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults


def test_of_several_builders_one_builds_and_the_others_wait_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[object] = []
    build = npcache._build

    def counted(*arguments: Any) -> None:
        builds.append(arguments)
        build(*arguments)

    monkeypatch.setattr(npcache, "_build", counted)
    assert in_threads(4, lambda: build_npcache(folder)) == []
    assert len(builds) == 1
    assert_equal(loaded(folder)[0])


@pytest.mark.parametrize("stale", [False, True])
def test_where_files_cannot_be_locked_builders_do_not_break_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    if stale:
        build_npcache(folder)
        os.utime(folder / "pytorch_model.bin")
    monkeypatch.setattr(f"{WRITE}.fcntl.flock", denied(errno.ENOLCK))
    together = threading.Barrier(3)
    put = npcache_write._put_in_place

    def put_together(new: Path, place: Path) -> None:
        together.wait()
        put(new, place)

    monkeypatch.setattr(npcache_write, "_put_in_place", put_together)
    assert in_threads(3, lambda: npcache_build(folder)) == []
    assert_equal(loaded(folder)[0])
    assert sorted(p.name for p in folder.iterdir()) == [".np.lock", "np", "pytorch_model.bin"]


def npcache_build(folder: Path) -> None:
    """Build without looking whether another has built meanwhile."""
    with open_files(folder, load_format="npcache", originals=True) as originals, npcache_write.one_builder(folder):
        npcache._build(originals, folder, ReadOptions())


def test_secondary_sources_have_caches_of_their_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        torch.save({"w": ar(2, start=len(name))}, tmp_path / name / "pytorch_model.bin")

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))
            self.extra = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2))})
            loader = get_model_loader(LoadConfig(load_format="npcache"))
            self.secondary_weights = [type(loader).Source(str(tmp_path / "two"), prefix="extra.")]  # type: ignore[attr-defined]

    model, report = loaded(tmp_path / "one", Both)
    assert model.get_parameter("extra.w").tolist() == [3, 4]
    assert sorted(report.files) == ["primary/np/w", "secondary-1/np/w"]
    assert (tmp_path / "two" / "np" / "tensorferry.json").is_file()


def test_a_model_with_a_loader_of_its_own_gets_the_cache_s_tensors(folder: Path) -> None:
    class Own(Model):
        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
            names = set()
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)
                names.add(name)
            return names

    model, report = loaded(folder, Own)
    assert_equal(model)
    assert report.format == "npcache"


def test_building_is_streamed_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")  # so that what is freed does not look held
    torch.save({f"w{i}": torch.full((2 << 20,), float(i)) for i in range(24)}, tmp_path / "pytorch_model.bin")
    told = measured(
        """
from tensorferry.loaders import build_npcache
build_npcache(folder)  # what imports and threads take is not of interest
import shutil
shutil.rmtree(folder + "/np")
options = ReadOptions(max_staging=16 << 20, max_read=4 << 20)
told["peak"], _ = peak.of(lambda: build_npcache(folder, options=options))
""",
        tmp_path,
    )
    assert told["peak"] < 64 << 20
    assert sum(p.stat().st_size for p in (tmp_path / "np").iterdir()) > 192 << 20
