"""Somebody who may write to the folder changes it between the checks and the opening of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorferry.errors import LocateError, UnsafeFile
from tensorferry.storage.folder import Folder
from tensorferry.storage.local import LocalStorage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint" / "sub").mkdir(parents=True)
    (tmp_path / "checkpoint" / "sub" / "w").write_bytes(b"inside")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "w").write_bytes(b"secret")
    return tmp_path / "checkpoint"


def read(storage: LocalStorage) -> bytes:
    out = bytearray(6)
    storage.read_into("sub/w", 0, memoryview(out))
    return bytes(out)


def test_a_folder_that_becomes_a_link_after_the_check_leads_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = Folder.resolve

    def then_swapped(self: Folder, path: str) -> tuple[str, os.stat_result]:
        found = checked(self, path)
        (folder / "sub").rename(folder / "aside")
        (folder / "sub").symlink_to("../elsewhere")
        return found

    with LocalStorage(folder) as storage:
        monkeypatch.setattr(Folder, "resolve", then_swapped)
        with pytest.raises(UnsafeFile, match=r"leads out of its folder, to .*elsewhere/w"):
            read(storage)


def test_a_folder_that_goes_while_its_links_are_followed_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(path: str) -> str:
        raise FileNotFoundError(2, "No such file or directory", path)

    with LocalStorage(folder) as storage:
        monkeypatch.setattr(os.path, "realpath", gone)
        with pytest.raises(LocateError, match=r"sub/w .*No such file"):
            read(storage)


def test_a_file_that_is_removed_while_it_is_opened_is_still_the_one_that_was_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def then_removed(path: str, flags: int) -> int:
        fd = opened(path, flags)
        Path(path).unlink()
        return fd

    with LocalStorage(folder) as storage:
        monkeypatch.setattr(os, "open", then_removed)
        assert read(storage) == b"inside"
