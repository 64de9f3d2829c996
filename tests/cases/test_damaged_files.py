"""Damaged safetensors files that people really met, one test for each case of the section on damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from helpers.checkpoints import ar, raw, write_raw_safetensors, write_safetensors
from helpers.measuring import MIB, little_memory
from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import CorruptFile
from tensorferry.formats.safetensors import SafetensorsFormat
from tensorferry.storage.local import LocalStorage


def catalogue(path: Path) -> Catalogue:
    with LocalStorage(path.parent) as storage:
        return SafetensorsFormat().catalogue(storage, storage.stat(path.name))


def values(path: Path, name: str) -> bytes:
    """Return the bytes of one tensor, read where its entry says."""
    with LocalStorage(path.parent) as storage:
        span = SafetensorsFormat().catalogue(storage, storage.stat(path.name))[name].span
        assert span is not None
        out = bytearray(span.length)
        storage.read_into(span.file, span.offset, memoryview(out))
        return bytes(out)


def refusal(path: Path) -> str:
    with pytest.raises(CorruptFile) as refused:
        catalogue(path)
    assert path.name in str(refused.value)
    return str(refused.value)


def test_corr_01_a_git_lfs_pointer_is_told_with_the_size_of_what_it_stands_for(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4096\n")
    message = refusal(path)
    assert "LFS pointer" in message
    assert "4096" in message
    assert "sha256:" + "0" * 64 in message
    assert "git lfs pull" in message


def test_corr_03_a_truncated_data_part_is_told_with_both_sizes_and_the_first_tensor_hit(tmp_path: Path) -> None:
    path = write_raw_safetensors(tmp_path / "model.safetensors", [("w", "F32", (2,), raw(ar(2)))], pad_to=92)
    whole = path.read_bytes()
    assert len(whole) == 108
    path.write_bytes(whole[:100])
    message = refusal(path)
    assert "header declares 108 bytes, file has 100" in message
    assert "first tensor hit: 'w'" in message


def test_corr_03_the_first_tensor_hit_is_the_first_in_the_file(tmp_path: Path) -> None:
    entries = [(name, "F32", (2,), raw(ar(2))) for name in ("a", "b", "c")]
    path = write_raw_safetensors(tmp_path / "model.safetensors", entries)
    path.write_bytes(path.read_bytes()[:-9])
    assert "first tensor hit: 'b'" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"\x40" + bytes(6), b"\x40" + bytes(7), b"\x40" + bytes(7) + b'{"w":{"dty'])
def test_corr_04_a_file_that_ends_inside_its_header_is_corrupt(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert str(len(content)) in refusal(path)


def test_corr_04_a_file_cut_anywhere_is_corrupt(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"a": ar(2, 3), "b": ar(4)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert refusal(path)


@pytest.mark.parametrize("length", [132_095_296, 2**63 + 5])
def test_corr_07_a_header_over_the_limit_is_refused_before_memory_is_taken(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" + b" " * 100)
    with little_memory(10 * MIB):
        message = refusal(path)
    assert f"header of {length} bytes, the limit of the format is 100000000" in message


def test_corr_09_two_tensors_of_the_same_bytes_are_both_named(tmp_path: Path) -> None:
    entries = [("k", "F32", (2,), raw(ar(2)), (0, 8)), ("v", "F32", (2,), b"", (0, 8))]
    message = refusal(write_raw_safetensors(tmp_path / "model.safetensors", entries))
    assert "overlap" in message
    assert "'k'" in message
    assert "'v'" in message


def test_corr_10_a_shape_larger_than_its_bytes_is_refused_with_both_numbers(tmp_path: Path) -> None:
    message = refusal(write_raw_safetensors(tmp_path / "model.safetensors", [("t", "F32", (1000, 1000), b"\0" * 4)]))
    assert "'t'" in message
    assert "takes 4000000 bytes" in message
    assert "span 4" in message


def test_corr_11_a_hole_between_tensors_is_refused(tmp_path: Path) -> None:
    entries = [
        ("x", "F32", (2,), raw(ar(2)) + b"\0" * 8, (0, 8)),
        ("y", "F32", (2,), raw(ar(2, start=7)), (16, 24)),
    ]
    assert "hole: bytes 8 to 16" in refusal(write_raw_safetensors(tmp_path / "hole.safetensors", entries))


def test_corr_11_any_order_of_the_header_is_read(tmp_path: Path) -> None:
    entries = [("y", "F32", (2,), raw(ar(2)), (8, 16)), ("x", "F32", (2,), raw(ar(2, start=7)), (0, 8))]
    path = write_raw_safetensors(tmp_path / "swapped.safetensors", entries)
    assert list(catalogue(path)) == ["x", "y"]
    assert values(path, "x") == raw(ar(2))
    assert values(path, "y") == raw(ar(2, start=7))


def test_corr_15_wrong_bytes_of_the_right_size_cannot_be_seen_in_a_header(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})
    flipped = bytearray(path.read_bytes())
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    assert catalogue(path)["w"].nbytes == 8


def test_disc_14_an_empty_weight_file_is_corrupt_not_absent(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    assert "it is empty" in refusal(path)
