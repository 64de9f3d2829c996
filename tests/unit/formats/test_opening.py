"""A checkpoint is opened: headers read, merged into one catalogue, held against the index."""

from __future__ import annotations

import errno
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoints import ar, write_index, write_safetensors
from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import (
    AccessDenied,
    ConfigError,
    CorruptFile,
    FormatError,
    LocateError,
    ReadError,
    UnknownFormat,
)
from tensorferry.formats import opening
from tensorferry.formats.opening import Opened, file_format, open_files
from tensorferry.storage.base import File, Storage
from tensorferry.storage.local import LocalStorage

INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def values(opened: Opened, name: str) -> list[float]:
    """Read a float32 tensor of an open checkpoint."""
    span = opened.catalogue[name].span
    assert span is not None
    data = bytearray(span.length)
    opened.storage.read_into(span.file, span.offset, memoryview(data))
    return list(struct.unpack(f"<{span.length // 4}f", data))


def sharded(folder: Path) -> Path:
    """Write two shards with an index: a, b in the first, c in the second."""
    write_safetensors(folder / A, {"a": ar(2), "b": ar(2, start=2)})
    write_safetensors(folder / B, {"c": ar(2, start=4)})
    return write_index(folder / INDEX, {"a": A, "b": A, "c": B})


# -- places ---------------


def test_a_folder_gives_all_its_entries_in_storage_order(tmp_path: Path) -> None:
    sharded(tmp_path)
    with open_files(tmp_path) as opened:
        assert list(opened.catalogue) == ["a", "b", "c"]
        assert opened.catalogue.files == (A, B)
        assert opened.catalogue.format == "safetensors"
        assert opened.catalogue.metadata == {"format": "pt"}
        assert opened.warnings == ()
        assert values(opened, "c") == [4, 5]


def test_a_single_file_is_opened_as_it_is(tmp_path: Path) -> None:
    sharded(tmp_path)
    with open_files(tmp_path / B) as opened:
        assert list(opened.catalogue) == ["c"]
        assert opened.selection.reason == f"{B} was named"


def test_an_index_names_its_set(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_safetensors(tmp_path / "other.safetensors", {"x": ar(1)})
    write_index(tmp_path / "other.safetensors.index.json", {"x": "other.safetensors"})
    for path, names in ((INDEX, ["a", "b", "c"]), ("other.safetensors.index.json", ["x"])):
        with open_files(tmp_path / path) as opened:
            assert list(opened.catalogue) == names


def test_a_sub_folder_is_opened_on_demand(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", {"u": ar(2)})
    with open_files(tmp_path, subfolder="unet") as opened:
        assert list(opened.catalogue) == ["u"]
    with pytest.raises(LocateError, match=r"sub-folder unet/: 1 file.*Pass subfolder='unet'"):
        open_files(tmp_path)


def test_a_file_without_a_telling_name_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    written = write_safetensors(tmp_path / "w.safetensors", {"w": ar(2)})
    with open_files(written.rename(tmp_path / "weights")) as opened:
        assert list(opened.catalogue) == ["w"]


def test_a_file_that_is_something_else_is_said_to_be_that(tmp_path: Path) -> None:
    (tmp_path / "llama.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(UnknownFormat, match=r"llama\.h5.*an HDF5 file"):
        open_files(tmp_path / "llama.h5")


def test_nothing_there_is_said_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(LocateError, match="nowhere"):
        open_files(tmp_path / "nowhere")


def test_an_empty_file_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(CorruptFile, match="0 bytes"):
        open_files(tmp_path / "x.safetensors")


# -- options ---------------


@pytest.mark.parametrize("option", [{"subfolder": "x"}, {"variant": "fp16"}, {"allow_patterns": ["*"]}])
def test_options_that_choose_in_a_folder_are_refused_for_a_file(tmp_path: Path, option: dict[str, str]) -> None:
    path = write_safetensors(tmp_path / "w.safetensors", {"w": ar(2)})
    with pytest.raises(ConfigError, match="is one file"):
        open_files(path, **option)  # type: ignore[arg-type]


def test_a_file_of_another_format_than_asked_for_is_refused(tmp_path: Path) -> None:
    torch.save({"w": ar(2)}, tmp_path / "w.bin")
    with pytest.raises(ConfigError, match="load_format 'safetensors' does not take"):
        open_files(tmp_path / "w.bin", load_format="safetensors")


def test_at_least_one_worker_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_workers"):
        open_files(tmp_path, max_workers=0)


def test_an_unknown_file_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownFormat, match="safetensors, torch"):
        file_format("onnx")


# -- headers ---------------


def test_headers_are_read_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(1, 4):
        write_safetensors(tmp_path / f"m-{i}-of-3.safetensors", {f"t{i}": ar(1)})
    met = threading.Barrier(3, timeout=60)
    real = file_format("safetensors")

    class Waiting:
        name = "safetensors"

        def catalogue(self, storage: Storage, file: File) -> Catalogue:
            met.wait()
            return real.catalogue(storage, file)

    monkeypatch.setattr(opening, "file_format", lambda name: Waiting())
    with open_files(tmp_path, max_workers=3) as opened:
        assert list(opened.catalogue) == ["t1", "t2", "t3"]


def test_all_damaged_files_are_named_at_once(tmp_path: Path) -> None:
    sharded(tmp_path)
    for name in (A, B):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
    with pytest.raises(CorruptFile, match="2 files cannot be believed") as caught:
        open_files(tmp_path)
    assert A in str(caught.value)
    assert B in str(caught.value)


def test_a_failed_opening_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(LocalStorage, "close", lambda self: closed.append(self.uri))
    (tmp_path / "model.safetensors").write_bytes(b"1234567890")
    with pytest.raises(CorruptFile):
        open_files(tmp_path)
    assert closed == [str(tmp_path)]


def test_a_closed_checkpoint_keeps_its_catalogue_and_reads_no_more(tmp_path: Path) -> None:
    sharded(tmp_path)
    with open_files(tmp_path) as opened:
        pass
    assert "a" in opened.catalogue
    with pytest.raises(ReadError, match="closed"):
        values(opened, "a")


# -- the index ---------------


def test_a_tensor_of_the_index_that_no_file_has_is_corrupt_and_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_index(tmp_path / INDEX, {"a": A, "b": A, "c": B, "lost": B, "gone": B})
    with pytest.raises(CorruptFile, match=rf"{INDEX}.*'lost' is in {B}, where it is not \(and 1 more"):
        open_files(tmp_path)


def test_a_tensor_in_another_shard_than_the_index_says_is_corrupt(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_index(tmp_path / INDEX, {"a": A, "b": B, "c": B})
    with pytest.raises(CorruptFile, match=f"'b' is in {B}, and it is in {A}"):
        open_files(tmp_path)


def test_tensors_that_the_index_lacks_are_kept_and_noted(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_index(tmp_path / INDEX, {"a": A, "c": B})
    with open_files(tmp_path) as opened:
        assert list(opened.catalogue) == ["a", "b", "c"]
        assert opened.warnings == (f"tensor b is in the files but not in {INDEX}: kept",)


def test_of_equal_tensors_in_two_shards_the_one_of_the_index_is_used(tmp_path: Path) -> None:
    write_safetensors(tmp_path / A, {"a": ar(2), "w": ar(3)})
    write_safetensors(tmp_path / B, {"b": ar(2), "w": ar(3)})
    for where, other in ((A, B), (B, A)):
        write_index(tmp_path / INDEX, {"a": A, "b": B, "w": where})
        with open_files(tmp_path) as opened:
            assert opened.catalogue["w"].files == (where,)
            assert opened.warnings == (
                f"tensor w is in {where} and again in {other}, with equal bytes: the former is used",
            )


# -- one name in two files ---------------


def two_files(folder: Path, one: torch.Tensor, other: torch.Tensor) -> Path:
    write_safetensors(folder / "a.safetensors", {"w": one, "a": ar(1)})
    write_safetensors(folder / "b.safetensors", {"w": other, "b": ar(1)})
    return folder


def test_equal_tensors_are_kept_once_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tensorferry"), open_files(two_files(tmp_path, ar(2), ar(2))) as opened:
        assert sorted(opened.catalogue) == ["a", "b", "w"]
        assert opened.catalogue["w"].files == ("a.safetensors",)
    (warning,) = opened.warnings
    assert warning.startswith("tensor w is in a.safetensors and again in b.safetensors")
    assert warning in caplog.text


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (ar(2, start=1), "different bytes"),
        (ar(1, 2), r"F32 \[2\] and F32 \[1, 2\]"),
        (ar(2).half(), r"F32 \[2\] and F16 \[2\]"),
    ],
)
def test_different_tensors_of_one_name_are_refused_with_both_files(
    tmp_path: Path, other: torch.Tensor, found: str
) -> None:
    with pytest.raises(FormatError, match=rf"duplicate name: tensor 'w' is in a\.safetensors and in b\..*{found}"):
        open_files(two_files(tmp_path, ar(2), other))


def test_tensors_that_differ_in_their_last_byte_are_different(tmp_path: Path) -> None:
    size = (4 << 20) + 3  # one block of the comparison, and a bit
    one = torch.zeros(size, dtype=torch.uint8)
    other = one.clone()
    other[-1] = 1
    with pytest.raises(FormatError, match="duplicate name"):
        open_files(two_files(tmp_path, one, other))


def test_where_files_say_different_things_of_themselves_the_first_is_believed(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "two")):
        save_file({name: ar(2)}, tmp_path / f"{name}.safetensors", metadata={"k": text, name: "x"})
    with open_files(tmp_path) as opened:
        assert opened.catalogue.metadata == {"k": "one", "a": "x", "b": "x"}


# -- what it costs ---------------


def test_nothing_of_it_imports_torch() -> None:
    code = "import sys, tensorferry.formats.opening, tensorferry.formats.download; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_file_that_may_not_be_read_is_told_from_one_that_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links into closed folders; the one who runs the tests may be let into everything, so it is made up."""
    sharded(tmp_path)
    (tmp_path / "closed").mkdir()
    (tmp_path / "model.safetensors").symlink_to("closed/w.safetensors")
    there = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.name in ("model.safetensors", "w.safetensors", B):
            raise PermissionError(errno.EACCES, "Permission denied")
        return there(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(AccessDenied, match=f"{B}.*Permission denied"):
        open_files(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(AccessDenied, match=r"Permission denied"):
        open_files(tmp_path, allow_patterns=["model.safetensors"])


def test_a_sub_folder_that_may_not_be_looked_into_is_no_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    there = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied")
        return there(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(LocateError, match="There is no weight file"):
        open_files(tmp_path)
