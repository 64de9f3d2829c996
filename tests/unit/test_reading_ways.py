"""Loads that go past the page cache, leave it as it was, or map: by options, from real files, seen in the report."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from helpers.checkpoints import ar, raw
from tensorferry import ConfigError, LoadConfig, ReadError, ReadOptions, load, open_checkpoint
from tensorferry.storage.local import LocalStorage

MIB = 1 << 20
ROWS = {"a": 1024, "b": 513, "c": 3}  # of 4 KiB


def write(path: Path, *, begin: int = 0) -> dict[str, torch.Tensor]:
    """Write a safetensors file whose data begins at `begin` modulo 4096, on disk and not in the page cache."""
    tensors = {name: ar(rows, 1024, start=rows) for name, rows in ROWS.items()}
    header, at = [], 0
    for name, tensor in tensors.items():
        header.append(
            f'"{name}":{{"dtype":"F32","shape":{list(tensor.shape)},"data_offsets":[{at},{at + tensor.nbytes}]}}'
        )
        at += tensor.nbytes
    text = ("{" + ",".join(header) + "}").encode()
    text += b" " * ((begin - 8 - len(text)) % 4096)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(map(raw, tensors.values())))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with LocalStorage(path.parent) as storage:
        if not storage.uncached(path.name).possible or storage.absent_ranges(path.name, 0, 1) is None:
            pytest.skip(storage.uncached(path.name).why or "the system does not tell what its page cache holds")
    return tensors


def empty(device: str = "meta") -> Any:  # a module whose parameters are found by name
    return nn.ParameterDict({n: nn.Parameter(torch.empty(rows, 1024, device=device)) for n, rows in ROWS.items()})


def same(model: Any, tensors: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(model[name].detach(), tensor) for name, tensor in tensors.items())


def cached(path: Path) -> int:
    """Return how many bytes of a file are in the page cache."""
    with LocalStorage(path.parent) as storage:
        absent = storage.absent_ranges(path.name, 0, path.stat().st_size)
        assert absent is not None
        return -(-path.stat().st_size // 4096) * 4096 - sum(length for _, length in absent)


@pytest.mark.parametrize("begin", [0, 64, 8])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_load_past_the_page_cache_brings_the_same_values(tmp_path: Path, begin: int, device: str) -> None:
    tensors, model = write(tmp_path / "f.safetensors", begin=begin), empty(device)
    report = load(model, tmp_path, options=ReadOptions(direct="always"))
    assert same(model, tensors)
    assert report.ways == {"direct": report.bytes_read}
    assert report.bytes_read == report.bytes_needed == report.direct_bytes == 1540 * 4096


def test_parameters_that_we_allocate_are_read_without_a_copy(tmp_path: Path) -> None:
    tensors, model = write(tmp_path / "f.safetensors", begin=64), empty()
    report = load(model, tmp_path, options=ReadOptions(direct="always"))
    assert same(model, tensors)
    assert report.copied_bytes <= tensors["c"].nbytes + 8192 * 2 * report.reads
    for name in ("a", "b"):
        parameter = model[name]
        assert parameter.data_ptr() % 4096 == 64
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert (parameter.storage_offset(), parameter.is_leaf, parameter.requires_grad) == (0, True, True)
    assert len({p.untyped_storage().data_ptr() for p in model.values()}) == 3


def test_memory_of_the_caller_is_filled_through_one_copy(tmp_path: Path) -> None:
    tensors, model = write(tmp_path / "f.safetensors", begin=8), empty("cpu")
    before = {n: p.data_ptr() for n, p in model.items()}
    report = load(model, tmp_path, options=ReadOptions(direct="always"))
    assert same(model, tensors)
    assert {n: p.data_ptr() for n, p in model.items()} == before
    assert report.copied_bytes <= report.bytes_read


def test_addresses_on_which_computing_is_slower_are_not_given(tmp_path: Path) -> None:
    write(tmp_path / "f.safetensors", begin=8)
    model = empty()
    load(model, tmp_path)
    assert all(p.data_ptr() % 64 == 0 for p in model.values())


def test_by_default_cold_files_of_a_local_disk_are_read_directly_and_cached_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    write(path, begin=64)
    with LocalStorage(tmp_path) as storage:
        if storage.uncached(path.name).why:
            pytest.skip(f"temporary files lie on {storage.uncached(path.name).why}")
    cold = load(empty(), tmp_path)
    assert cold.ways.get("direct", 0) >= cold.bytes_read - MIB
    path.read_bytes()
    warm = load(empty(), tmp_path)
    assert warm.ways.get("cached", 0) >= warm.bytes_read - MIB
    assert "direct" not in warm.ways
    assert f"came: {warm.ways['cached'] / MIB:.1f} MiB cached" in str(warm)


def test_the_page_cache_is_left_as_it_was_when_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    tensors = write(path)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(40_000)
    with open_checkpoint(tmp_path, options=ReadOptions(direct="never", keep_cache=False)) as checkpoint:
        before, model = cached(path), empty()
        load(model, checkpoint)
    assert same(model, tensors)
    assert 0 < cached(path) == before
    load(empty(), tmp_path, options=ReadOptions(direct="never"))
    assert cached(path) >= path.stat().st_size


@pytest.mark.parametrize("option", [{"direct": "always"}, {"keep_cache": False}])
def test_strategies_that_live_by_the_page_cache_refuse_to_go_without(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="strategy 'prefetch' reads through the page cache"):
        LoadConfig(strategy="prefetch", read=ReadOptions(**option))


@pytest.mark.parametrize(
    "option",
    [
        {"direct": "yes"},
        {"direct": True},
        {"keep_cache": 1},
        {"mapped": "no"},
        {"huge_pages": None},
        {"turn": 1},
        {"turn": (0,)},
        {"turn": (2, 2)},
        {"turn": (-1, 2)},
        {"turn": (True, 2)},
        {"turn": (0, 2), "shared": False},
    ],
)
def test_options_that_are_none_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        ReadOptions(**option)


def test_streamed_tensors_are_read_directly_too(tmp_path: Path) -> None:
    tensors = write(tmp_path / "f.safetensors", begin=8)
    with open_checkpoint(tmp_path, options=ReadOptions(direct="always")) as checkpoint:
        found = dict(checkpoint.tensors())
    assert all(torch.equal(found[n], t) for n, t in tensors.items())


class TestMapped:
    OPTIONS = ReadOptions(mapped=True)

    def test_parameters_are_views_of_the_file_and_nothing_is_read(self, tmp_path: Path) -> None:
        tensors, model = write(tmp_path / "f.safetensors"), empty()
        report = load(model, tmp_path, options=self.OPTIONS)
        assert (report.bytes_read, report.reads, report.mapped_bytes) == (0, 0, report.bytes_needed)
        assert same(model, tensors)
        assert str(tmp_path / "f.safetensors") in Path("/proc/self/maps").read_text()
        assert {p.untyped_storage().nbytes() for p in model.values()} == {t.nbytes for t in tensors.values()}
        assert "mapped" in str(report)

    def test_what_is_written_to_them_stays_in_this_process(self, tmp_path: Path) -> None:
        path = tmp_path / "f.safetensors"
        write(path)
        before, model = path.read_bytes(), empty()
        load(model, tmp_path, options=self.OPTIONS)
        with torch.no_grad():
            model["a"].zero_()
        assert path.read_bytes() == before
        assert load(other := empty(), tmp_path, options=self.OPTIONS).mapped_bytes
        assert other["a"].any()

    def test_what_is_cast_or_has_memory_already_is_read(self, tmp_path: Path) -> None:
        tensors = write(tmp_path / "f.safetensors")
        model = empty()
        model["b"] = nn.Parameter(torch.empty(513, 1024, device="meta", dtype=torch.float64))
        model["c"] = nn.Parameter(torch.empty(3, 1024))
        report = load(model, tmp_path, options=self.OPTIONS)
        assert same(model, {n: t.to(model[n].dtype) for n, t in tensors.items()})
        assert report.mapped_bytes == tensors["a"].nbytes
        assert report.bytes_read >= tensors["b"].nbytes + tensors["c"].nbytes

    def test_what_lies_on_an_odd_address_is_read(self, tmp_path: Path) -> None:
        tensors, model = write(tmp_path / "f.safetensors", begin=2), empty()
        report = load(model, tmp_path, options=self.OPTIONS)
        assert (report.mapped_bytes, same(model, tensors)) == (0, True)

    def test_modules_are_post_processed_as_ever(self, tmp_path: Path) -> None:
        class Layer(nn.Linear):
            def process_weights_after_loading(self) -> None:
                self.total = float(self.weight.sum())

        save_file({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, tmp_path / "model.safetensors")
        with torch.device("meta"):
            model = Layer(4, 4)
        report = load(model, tmp_path, options=self.OPTIONS)
        assert (model.total, report.mapped_bytes, report.post_processed) == (16.0, 80, ("",))

    def test_a_file_that_changes_is_noticed_when_asked_even_later(self, tmp_path: Path) -> None:
        path = tmp_path / "f.safetensors"
        write(path)
        model = empty()
        with open_checkpoint(tmp_path, options=self.OPTIONS) as checkpoint:
            load(model, checkpoint)
        checkpoint.storage.check_unchanged()
        os.utime(path, ns=(1, 1))
        with pytest.raises(ReadError, match=r"f\.safetensors.*changed while it was in use"):
            checkpoint.storage.check_unchanged()

    def test_nothing_holds_the_file_when_the_model_is_gone(self, tmp_path: Path) -> None:
        write(tmp_path / "f.safetensors")
        model = empty()
        gc.disable()
        try:
            load(model, tmp_path, options=self.OPTIONS)
        finally:
            gc.enable()
        del model  # and without the garbage collector
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(fd)]


def test_many_loads_leave_no_thread_descriptor_or_map(tmp_path: Path) -> None:
    write(tmp_path / "f.safetensors", begin=64)

    def held() -> tuple[int, set[threading.Thread]]:
        # Not the threads of the system: other libraries in this process start some when they like.
        return len(os.listdir("/proc/self/fd")), set(threading.enumerate())

    def once(**options: Any) -> None:
        load(empty(), tmp_path, options=ReadOptions(**options))

    once()
    gc.collect()  # what other tests have left, so that it does not go meanwhile
    before = held()
    for _ in range(10):
        once(direct="always")
        once(mapped=True)
        once(direct="never", keep_cache=False)
    assert held() == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
