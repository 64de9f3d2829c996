"""What verifying finds in bytes that headers cannot tell, and what it says it compared."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import ar, write_index, write_safetensors
from tensorferry.checkpoint import open_checkpoint
from tensorferry.errors import CorruptFile, LocateError
from tensorferry.progress import Silent
from tensorferry.verify import FileVerified, Verified, verify, verify_files


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip_last_byte(path: Path) -> str:
    """Change the last byte of `path`, whose size stays; return its new sha256."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return sha256(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "model.safetensors", {"w": ar(2, 3)})


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, Path]:
    """Two shards and their index."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    first = write_safetensors(tmp_path / names[0], {"a": ar(2)})
    second = write_safetensors(tmp_path / names[1], {"b": ar(2, start=5)})
    write_index(tmp_path / "model.safetensors.index.json", {"a": names[0], "b": names[1]})
    return first, second


def test_every_file_is_read_and_its_digest_told(shards: tuple[Path, Path]) -> None:
    verified = verify(shards[0].parent)
    index = shards[0].parent / "model.safetensors.index.json"
    assert [(f.path, f.size, f.sha256) for f in verified.files] == [
        (p.name, p.stat().st_size, sha256(p)) for p in (index, *shards)
    ]
    assert (verified.tensors, verified.nbytes, verified.format) == (2, 16, "safetensors")


def test_without_any_digest_it_says_that_nothing_was_compared(file: Path) -> None:
    verified = verify(file.parent)
    assert [f.against for f in verified.files] == [""]
    assert verified.summary == "contents read, not verified: there was no digest to compare with"


def test_a_manifest_of_the_caller_is_compared(file: Path) -> None:
    verified = verify(file.parent, manifest={"model.safetensors": sha256(file)})
    assert verified.summary == "sha256 of 1 of 1 files verified against the manifest"


def test_a_byte_that_differs_is_told_with_both_digests(file: Path) -> None:
    before = sha256(file)
    after = flip_last_byte(file)
    with pytest.raises(CorruptFile) as caught:
        verify(file.parent, manifest={"model.safetensors": before})
    assert f"model.safetensors: sha256 is {after}, but the manifest says {before}" in str(caught.value)


def test_every_file_that_differs_is_told_at_once(shards: tuple[Path, Path]) -> None:
    with pytest.raises(CorruptFile) as caught:
        verify(shards[0].parent, manifest={shard.name: "0" * 64 for shard in shards})
    assert all(shard.name in str(caught.value) for shard in shards)


def test_a_manifest_of_the_caller_must_have_every_weight_file(shards: tuple[Path, Path]) -> None:
    with pytest.raises(LocateError, match=f"the manifest has no sha256 of {shards[1].name} of "):
        verify(shards[0].parent, manifest={shards[0].name: sha256(shards[0])})


def test_the_index_is_compared_where_the_manifest_has_it(shards: tuple[Path, Path]) -> None:
    digests = {shard.name: sha256(shard) for shard in shards}
    with pytest.raises(CorruptFile, match=r"model\.safetensors\.index\.json: sha256 is"):
        verify(shards[0].parent, manifest={**digests, "model.safetensors.index.json": "0" * 64})


def test_a_manifest_may_have_files_that_are_not_part_of_the_checkpoint(file: Path) -> None:
    digests = {"model.safetensors": sha256(file), "README.md": "0" * 64, "pytorch_model.bin": "0" * 64}
    assert verify(file.parent, manifest=digests).warnings == ()


def test_a_manifest_with_more_weight_files_of_the_kind_gives_a_warning(file: Path) -> None:
    digests = {"model.safetensors": sha256(file), "more.safetensors": "0" * 64}
    assert verify(file.parent, manifest=digests).warnings == (
        "the manifest also has more.safetensors, which the folder lacks",
    )


def test_a_manifest_in_the_folder_is_compared(file: Path) -> None:
    (file.parent / "SHA256SUMS").write_text(f"{sha256(file)}  ./model.safetensors\n")
    assert verify(file.parent).summary == "sha256 of 1 of 1 files verified against SHA256SUMS"
    flip_last_byte(file)
    with pytest.raises(CorruptFile, match="SHA256SUMS says"):
        verify(file.parent)


def test_a_manifest_in_the_folder_may_have_only_some_files_and_it_is_said_how_many(shards: tuple[Path, Path]) -> None:
    (shards[0].parent / "SHA256SUMS").write_text(f"{sha256(shards[0])}  {shards[0].name}\n")
    assert verify(shards[0].parent).summary == (
        "sha256 of 1 of 3 files verified against SHA256SUMS "
        "(none for model.safetensors.index.json, model-00002-of-00002.safetensors)"
    )


def test_a_manifest_of_the_caller_goes_before_the_one_in_the_folder(file: Path) -> None:
    (file.parent / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    assert verify(file.parent, manifest={"model.safetensors": sha256(file)}).files[0].against == "the manifest"


def test_a_single_file_is_verified_by_itself(shards: tuple[Path, Path]) -> None:
    (shards[0].parent / "SHA256SUMS").write_text(f"{sha256(shards[0])}  {shards[0].name}\n{'0' * 64}  other\n")
    verified = verify(shards[0])
    assert [(f.path, f.against) for f in verified.files] == [(shards[0].name, "SHA256SUMS")]


def test_a_subfolder_is_verified_by_its_own_manifest_or_by_one_further_up(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "unet" / "model.safetensors", {"w": ar(2)})
    (tmp_path / "SHA256SUMS").write_text(f"{sha256(file)}  unet/model.safetensors\n")
    further_up = verify(tmp_path, subfolder="unet", manifest=tmp_path / "SHA256SUMS")
    assert further_up.files[0].against == "the manifest"
    (tmp_path / "unet" / "SHA256SUMS").write_text(f"{sha256(file)}  model.safetensors\n")
    assert verify(tmp_path, subfolder="unet").files[0].against == "SHA256SUMS"


def test_damage_inside_a_torch_file_is_found_by_its_own_checksums(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": ar(1000)}, path)
    verified = verify(tmp_path)
    assert verified.files[0].checksummed >= 4000
    assert verified.summary == "checksums inside 1 of 1 files verified"
    data = path.read_bytes()
    at = data.index(ar(1000).numpy().tobytes()) + 12
    path.write_bytes(data[:at] + b"\x7f" + data[at + 1 :])
    with pytest.raises(CorruptFile, match=r"pytorch_model\.bin: damaged: 1 records differ from their checksums"):
        verify(tmp_path)


def test_a_legacy_torch_file_has_no_checksums_and_that_is_said(tmp_path: Path) -> None:
    torch.save({"w": ar(10)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert "not verified" in verify(tmp_path).summary


def test_a_damaged_header_is_told_before_anything_is_read(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptFile, match=r"model\.safetensors"):
        verify(file.parent)


def test_an_open_checkpoint_can_be_verified(file: Path) -> None:
    with open_checkpoint(file) as checkpoint:
        assert verify_files(checkpoint).files == (FileVerified("model.safetensors", file.stat().st_size, sha256(file)),)


def test_the_text_is_what_sha256sum_would_write_and_what_was_compared() -> None:
    files = (FileVerified("a\x1b.bin", 3, "1" * 64, "SHA256SUMS"), FileVerified("b.bin", 3, "2" * 64))
    assert str(Verified("there", "torch", 2, 2048, files, ("careful",))).splitlines() == [
        "there: 2 tensors, 2.0 KiB (torch); sha256 of 1 of 2 files verified against SHA256SUMS (none for b.bin)",
        f"  {'1' * 64}  a\\x1b.bin  = SHA256SUMS",
        f"  {'2' * 64}  b.bin",
        "  warning: careful",
    ]


def test_plain_data_has_these_keys_and_no_others(file: Path) -> None:
    data = verify(file).to_dict()
    assert set(data) == {"source", "format", "tensors", "nbytes", "files", "warnings", "summary"}
    assert set(data["files"][0]) == {"path", "size", "sha256", "against", "checksummed"}


class Interrupting(Silent):
    """Presses Ctrl-C when the first block has come."""

    def advance(self, nbytes: int) -> None:
        raise KeyboardInterrupt


def test_an_interruption_leaves_no_thread_behind(shards: tuple[Path, Path]) -> None:
    with pytest.raises(KeyboardInterrupt):
        verify(shards[0].parent, progress=Interrupting())
    assert not [t for t in threading.enumerate() if t.name.startswith("tensorferry")]


def test_verifying_a_safetensors_file_imports_neither_torch_nor_the_torch_file_reader(file: Path) -> None:
    code = (
        "import sys, tensorferry; tensorferry.verify(sys.argv[1]);"
        "sys.exit(bool({'torch', 'tensorferry.formats.torch_file'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)


def test_values_are_frozen(file: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        verify(file).tensors = 3  # type: ignore[misc]
