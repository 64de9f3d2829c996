"""An open checkpoint: what it tells, reading one tensor or all of them, and closing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import ar, raw, write_raw_safetensors, write_safetensors
from helpers.gguf_models import write_gguf
from tensorferry import Checkpoint, PackedTensor, ReadOptions, open_checkpoint
from tensorferry.errors import ConfigError, LocateError, PlanError, ReadError

TENSORS = {"a.weight": ar(2, 3), "b.weight": ar(4, start=10, dtype=torch.bfloat16), "b.bias": ar(1, start=20)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "model.safetensors", TENSORS)
    return tmp_path


def test_it_tells_what_is_in_it(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.catalogue) == set(TENSORS)
        assert checkpoint.catalogue.format == "safetensors"
        assert [f.path for f in checkpoint.selection.files] == ["model.safetensors"]
        assert checkpoint.uri == str(folder)
        assert checkpoint.warnings == ()
        assert repr(checkpoint).startswith(f"<Checkpoint {folder}: <Catalogue safetensors: 3 tensors")


def test_tensors_come_in_storage_order_with_values_and_types(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        found = dict(checkpoint.tensors())
        assert list(found) == list(checkpoint.catalogue)
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in TENSORS.items())


@pytest.mark.parametrize("mapped", [False, True])
def test_tensors_may_be_chosen_by_name_or_by_a_question(folder: Path, mapped: bool) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert [n for n, _ in checkpoint.tensors(["b.bias", "a.weight"], mapped=mapped)] == [
            n for n in checkpoint.catalogue if n != "b.weight"
        ]
        assert {n for n, _ in checkpoint.tensors(lambda n: n.startswith("b"), mapped=mapped)} == {"b.weight", "b.bias"}
        assert [n for n, _ in checkpoint.tensors([], mapped=mapped)] == []


def test_a_name_that_is_not_there_is_refused_at_once_with_what_may_be_meant(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        with pytest.raises(PlanError, match=r"holds no tensor 'a\.wieght'; did you mean a\.weight"):
            checkpoint.tensors(["a.wieght"])
        with pytest.raises(PlanError, match="holds no tensor 'zzz'"):
            checkpoint.read("zzz")


def test_a_pattern_for_a_name_is_refused_with_what_takes_its_place(folder: Path) -> None:
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(ConfigError, match=r"taken whole.* lambda name: name\.star"),
    ):
        checkpoint.tensors("a.*")


def test_one_tensor_is_read_into_memory_of_its_own(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        one, again = checkpoint.read("a.weight"), checkpoint.read("a.weight")
    one.zero_()
    assert torch.equal(again, TENSORS["a.weight"])


def test_mapped_tensors_outlive_the_checkpoint(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        found = dict(checkpoint.tensors(mapped=True))
    (folder / "model.safetensors").unlink()
    assert all(torch.equal(found[n], t) for n, t in TENSORS.items())


def test_a_storage_that_cannot_map_is_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(folder) as checkpoint:
        monkeypatch.delattr(type(checkpoint.storage), "map")
        with pytest.raises(ConfigError, match="cannot be mapped: read them"):
            checkpoint.tensors(mapped=True)


def test_reading_is_bounded_by_the_options(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", {f"t{i}": ar(1024) for i in range(50)})
    with open_checkpoint(folder, options=ReadOptions(max_staging=8192, max_read=4096)) as checkpoint:
        before, taken = checkpoint.storage.counters.bytes_read, 0  # type: ignore[attr-defined]
        for _, tensor in checkpoint.tensors():
            taken += tensor.nbytes
            assert checkpoint.storage.counters.bytes_read - before - taken <= 8192  # type: ignore[attr-defined]
        assert taken == 50 * 4096


def test_an_iterator_that_is_dropped_leaves_no_thread(folder: Path) -> None:
    before = set(threading.enumerate())
    with open_checkpoint(folder) as checkpoint:
        tensors = checkpoint.tensors()
        next(tensors)
        tensors.close()
        forgotten = checkpoint.tensors()
        next(forgotten)
        del forgotten
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_changes_meanwhile_is_told_of_at_the_end(folder: Path, mapped: bool) -> None:
    with open_checkpoint(folder) as checkpoint:
        tensors = checkpoint.tensors(mapped=mapped)
        next(tensors)
        os.utime(folder / "model.safetensors", ns=(1, 1))
        with pytest.raises(ReadError, match=r"model\.safetensors.*changed while it was in use"):
            list(tensors)


def test_closing_is_idempotent_and_keeps_the_catalogue(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.read("a.weight")
    checkpoint.close()
    checkpoint.close()
    assert len(checkpoint.catalogue) == 3
    with pytest.raises(ReadError, match=r"closed.*while reading a\.weight"):
        checkpoint.read("a.weight")


def test_closing_leaves_no_file_open(folder: Path) -> None:
    def links() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue
        return found

    with open_checkpoint(folder) as checkpoint:
        list(checkpoint.tensors())
        assert any(str(folder) in link for link in links())
    assert not any(str(folder) in link for link in links())


def test_types_that_torch_lacks_come_as_bytes(tmp_path: Path) -> None:
    path = write_raw_safetensors(tmp_path / "model.safetensors", [("w", "F6_E2M3", (2, 4), bytes(range(6)))])
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.read("w").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("mapped", [False, True])
def test_packed_tensors_come_with_their_type_when_asked_for(mapped: bool, tmp_path: Path) -> None:
    numbers = torch.linspace(-1, 1, 192).view(2, 96)
    file = write_gguf(tmp_path / "m.gguf", "llama", {}, {"n": torch.ones(4), "w": numbers}, packed={"w": "Q8_0"})
    with open_checkpoint(file) as checkpoint:
        found = dict(checkpoint.tensors(packed=True, mapped=mapped))
        bare = dict(checkpoint.tensors(mapped=mapped))
        alone = checkpoint.read("w", packed=True)
    packed = found["w"]
    assert isinstance(packed, PackedTensor)
    assert isinstance(alone, PackedTensor)
    assert (packed.type_name, packed.ggml_type, packed.shape) == ("Q8_0", 8, (2, 96))
    assert torch.equal(packed.blocks, bare["w"])
    assert torch.equal(alone.blocks, bare["w"])
    assert torch.allclose(packed.dequantize(), numbers, atol=0.01)
    assert torch.equal(found["n"], torch.ones(4))  # type: ignore[arg-type]


def test_a_single_file_may_be_opened(folder: Path) -> None:
    with open_checkpoint(folder / "model.safetensors") as checkpoint:
        assert raw(checkpoint.read("b.bias")) == raw(TENSORS["b.bias"])


def test_what_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(LocateError, match=r"nope: there is no such file or folder"):
        open_checkpoint(tmp_path / "nope")


def test_opening_and_listing_does_not_import_torch(folder: Path) -> None:
    code = (
        "import sys, tensorferry\n"
        "with tensorferry.open_checkpoint(sys.argv[1]) as c: print(len(c.catalogue), c.selection.reason)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_is_a_context_manager_that_returns_itself(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, Checkpoint)
    with checkpoint as same:
        assert same is checkpoint


@pytest.mark.parametrize("path", ["", b"/tmp", 3, None, []])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(ConfigError, match="a file or folder is expected"):
        open_checkpoint(path)  # type: ignore[arg-type]


def test_options_are_read_options(folder: Path) -> None:
    with pytest.raises(ConfigError, match="ReadOptions are expected, not dict"):
        open_checkpoint(folder, options={"threads": 2})  # type: ignore[arg-type]


def test_names_of_tensors_are_text(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        with pytest.raises(ConfigError, match="name of a tensor is expected, not int"):
            checkpoint.tensors(["a.weight", 3])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="name of a tensor is expected, not NoneType"):
            checkpoint.read(None)  # type: ignore[call-overload]
