"""Which files of digests are taken, and what they are held to say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorferry.errors import ConfigError, CorruptFile, LocateError, UnsafeFile
from tensorferry.manifest import MAX_MANIFEST_BYTES, Manifest, given_manifest, manifest_beside, parse_manifest
from tensorferry.storage.local import LocalStorage

A, B = "a" * 64, "b" * 64


def test_lines_are_read_as_sha256sum_writes_them() -> None:
    text = f"{A}  model.safetensors\n{B} *sub/two words.bin\n"
    assert parse_manifest(text, what="m") == {"model.safetensors": A, "sub/two words.bin": B}


def test_a_leading_dot_capital_digits_comments_blank_lines_and_carriage_returns_are_taken() -> None:
    text = f"# made by hand\r\n\n{A.upper()}  ./model.safetensors\r\n"
    assert parse_manifest(text, what="m") == {"model.safetensors": A}


@pytest.mark.parametrize("line", ["model.safetensors", f"{A[1:]}  m", f"{A}m", f"{A} m", f"{A}  ", f"SHA256 (m) = {A}"])
def test_any_other_line_is_refused_by_its_number(line: str) -> None:
    with pytest.raises(CorruptFile, match=r"^SUMS: line 2 is no sha256 and file name"):
        parse_manifest(f"{A}  first\n{line}\n", what="SUMS")


def test_a_refused_line_is_escaped() -> None:
    with pytest.raises(CorruptFile) as caught:
        parse_manifest("\x1b[2Jnothing", what="SUMS")
    assert "\x1b" not in str(caught.value)


def test_two_digests_of_one_file_are_refused_and_one_twice_is_not() -> None:
    assert parse_manifest(f"{A}  m\n{A}  m\n", what="SUMS") == {"m": A}
    with pytest.raises(CorruptFile, match="SUMS: line 2 gives m another sha256"):
        parse_manifest(f"{A}  m\n{B}  ./m\n", what="SUMS")


def test_a_mapping_is_a_manifest_that_binds(tmp_path: Path) -> None:
    assert given_manifest({"m": A.upper()}, str(tmp_path)) == Manifest("the manifest", {"m": A}, binding=True)


@pytest.mark.parametrize("digest", ["", "a" * 63, "sha256:" + A, None, 7])
def test_a_mapping_to_anything_but_a_sha256_is_refused(digest: object) -> None:
    with pytest.raises(ConfigError, match="m: 64 hex digits of a sha256 are expected"):
        given_manifest({"m": digest}, ".")  # type: ignore[dict-item]


def test_a_file_of_digests_may_lie_anywhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "sums").write_text(f"{A}  m\n")
    assert given_manifest(tmp_path / "elsewhere" / "sums", str(tmp_path)).digests == {"m": A}


def test_paths_of_a_manifest_further_up_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "SHA256SUMS").write_text(f"{A}  model.safetensors\n{B}  unet/model.safetensors\n")
    assert given_manifest(tmp_path / "SHA256SUMS", str(tmp_path / "unet")).digests == {"model.safetensors": B}


def test_paths_of_a_manifest_further_up_that_has_none_below_are_relative_to_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "sums").write_text(f"{A}  model.safetensors\n")
    assert given_manifest(tmp_path / "sums", str(tmp_path / "unet")).digests == {"model.safetensors": A}


def test_names_that_are_not_utf8_are_names(tmp_path: Path) -> None:
    (tmp_path / "sums").write_bytes(A.encode() + b"  m\xff.bin\n")
    (name,) = given_manifest(tmp_path / "sums", str(tmp_path)).digests
    assert os.fsencode(name) == b"m\xff.bin"


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(LocateError, match="the manifest cannot be read"):
        given_manifest(tmp_path / name, str(tmp_path))


def test_without_a_manifest_in_the_folder_nothing_is_known(tmp_path: Path) -> None:
    with LocalStorage(tmp_path) as storage:
        assert manifest_beside(storage) == Manifest("SHA256SUMS", {})


def test_a_manifest_in_the_folder_is_found_and_does_not_bind(tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(f"{A}  m\n")
    with LocalStorage(tmp_path) as storage:
        assert manifest_beside(storage) == Manifest("SHA256SUMS", {"m": A})


def test_a_manifest_in_the_folder_that_leads_out_of_it_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "secret").write_text("not yours")
    (tmp_path / "folder" / "SHA256SUMS").symlink_to(tmp_path / "secret")
    with LocalStorage(tmp_path / "folder") as storage, pytest.raises(UnsafeFile, match="leads out of its folder"):
        manifest_beside(storage)


def test_a_manifest_of_absurd_size_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "SHA256SUMS").open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with LocalStorage(tmp_path) as storage, pytest.raises(CorruptFile, match="at most 16,777,216 bytes"):
        manifest_beside(storage)
    with pytest.raises(CorruptFile, match="at most 16,777,216 bytes"):
        given_manifest(tmp_path / "SHA256SUMS", str(tmp_path))
