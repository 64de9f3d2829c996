"""A destination is what it was or the whole conversion, and what is left of others beside it is removed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.checkpoints import ar, write_safetensors
from tensorferry import ConfigError, CorruptFile, ReadError, UnsafeFile, WriteError, convert
from tensorferry.conversion import converting, place
from tensorferry.conversion.place import building
from tensorferry.formats import safetensors_write
from tensorferry.formats.writing import write_chunks


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "src" / "model.safetensors", {"w": ar(2)}).parent


def build(destination: Path, text: str, *, overwrite: bool = False) -> None:
    with building(destination, single=False, overwrite=overwrite) as folder:
        (folder / "file").write_text(text)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_destination_appears_whole_and_nothing_is_left_beside(tmp_path: Path) -> None:
    with building(tmp_path / "out", single=False, overwrite=False) as folder:
        (folder / "file").write_text("new")
        assert left(tmp_path) == [".out.tensorferry.part"]
    assert left(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "new"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), building(tmp_path / "out", single=False, overwrite=False) as folder:
        (folder / "absent" / "file").write_text("new")
    assert left(tmp_path) == []


def test_an_empty_folder_is_filled_and_another_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    build(tmp_path / "out", "new")
    with pytest.raises(ConfigError, match="is there already: give another name, or replace it with overwrite=True"):
        build(tmp_path / "out", "newer")
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert left(tmp_path) == ["out"]


@pytest.mark.parametrize("exchanging", [True, False])
def test_what_is_there_is_replaced_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanging: bool
) -> None:
    if not exchanging:
        monkeypatch.setattr(place, "_exchanged", lambda one, other: False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with building(tmp_path / "out", single=False, overwrite=True) as folder:
        (folder / "file").write_text("new")
        assert left(tmp_path / "out") == ["old"]
    assert left(tmp_path / "out") == ["file"]
    assert left(tmp_path) == ["out"]


def test_what_was_put_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    theirs = tmp_path / "out" / "theirs"
    with pytest.raises(ConfigError, match="there already"), building(tmp_path / "out", single=False, overwrite=False):
        theirs.mkdir(parents=True)
    assert left(tmp_path / "out") == ["theirs"]


def test_a_file_takes_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with building(tmp_path / "x", single=True, overwrite=True) as folder:
        (folder / "model.x").write_text("new")
    assert (tmp_path / "x").read_text() == "new"
    with pytest.raises(ConfigError, match="is a file, and a folder is to be written"):
        build(tmp_path / "x", "new", overwrite=True)


def test_what_a_killed_conversion_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    part = tmp_path / ".out.tensorferry.part"
    (part / "new").mkdir(parents=True)
    (part / "new" / "torn").write_text("x")
    (part / "lock").write_text("")
    (tmp_path / ".other.tensorferry.part").mkdir()
    build(tmp_path / "out", "new")
    assert left(tmp_path) == [".other.tensorferry.part", "out"]
    assert left(tmp_path / "out") == ["file"]


def test_what_a_killed_conversion_was_about_to_replace_comes_back(tmp_path: Path) -> None:
    old = tmp_path / ".out.tensorferry.part" / "old"
    old.mkdir(parents=True)
    (old / "old").write_text("old")
    with pytest.raises(ConfigError, match="there already"):
        build(tmp_path / "out", "new")
    assert left(tmp_path) == ["out"]
    assert left(tmp_path / "out") == ["old"]


def test_a_second_one_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    with building(tmp_path / "out", single=False, overwrite=False) as folder:
        with pytest.raises(WriteError, match=r"out: another process is writing it \(it holds .*/lock"):
            build(tmp_path / "out", "second")
        (folder / "file").write_text("first")
    assert (tmp_path / "out" / "file").read_text() == "first"


def test_a_lock_of_a_folder_that_is_gone_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening a lock and getting it, whoever had it may have finished and removed its folder."""
    real, waited = fcntl.flock, [True]

    def flock(fd: int, how: int) -> None:
        real(fd, how)
        if waited:
            waited.clear()
            (tmp_path / ".out.tensorferry.part" / "lock").unlink()
            (tmp_path / ".out.tensorferry.part").rmdir()

    monkeypatch.setattr(fcntl, "flock", flock)
    build(tmp_path / "out", "new")
    assert left(tmp_path) == ["out"]


def test_a_link_in_the_place_of_the_folder_beside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.tensorferry.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFile, match="is a link, where a folder is expected"):
        build(tmp_path / "out", "new")


def test_a_link_at_the_destination_is_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    convert(source, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert left(tmp_path / "disk") == ["model.safetensors"]


def full(*arguments: Any, **options: Any) -> Iterator[Any]:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_rem_09_a_full_disk_says_what_is_needed_and_what_is_free_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_write, "write_chunks", full)
    with pytest.raises(
        WriteError,
        match=r"/out: No space left on device \([0-9.]+ KiB are needed, .* are free\); nothing is left half written",
    ) as caught:
        convert(source, tmp_path / "out")
    assert caught.value.errno == errno.ENOSPC
    assert left(tmp_path) == ["src"]


def test_a_disk_that_looks_too_small_is_a_warning_beforehand(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    account = convert(source, tmp_path / "out", dry_run=True)
    assert any(warning.endswith("B are needed, and 10 B are free") for warning in account.warnings)
    assert convert(source, tmp_path / "out").tensors == 1


def test_a_source_that_changes_meanwhile_is_the_sources_fault(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*arguments: Any) -> None:
        real(*arguments)
        os.utime(source / "model.safetensors", ns=(1, 1))

    real = write_chunks
    monkeypatch.setattr(safetensors_write, "write_chunks", touched)
    with pytest.raises(ReadError, match="changed while it was in use"):
        convert(source, tmp_path / "out")
    assert left(tmp_path) == ["src"]


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_bytes_that_are_read_back_different_are_refused_by_the_name_of_their_tensor(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converting, "forget_cached", lambda folder: changed(folder / "model.safetensors"))
    with pytest.raises(CorruptFile, match=r"tensor 'w' is not what was written.*nothing was put in place"):
        convert(source, tmp_path / "out")
    assert left(tmp_path) == ["src"]
    convert(source, tmp_path / "out", verify=False)


def test_every_failure_of_the_system_leaves_all_or_nothing(source: Path, tmp_path: Path) -> None:
    """Fail each system call that writes, one after the other, in a conversion that replaces another one."""
    convert(source, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    write_safetensors(source / "model.safetensors", {"w": ar(3)})
    found = []
    for number in range(100):
        if not _fails_at(number, source, tmp_path / "out"):
            break
        assert left(tmp_path / "out") == ["model.safetensors"]
        found.append((tmp_path / "out" / "model.safetensors").read_bytes())
    after = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert left(tmp_path) == ["out", "src"]
    assert len(found) >= 6
    assert found == sorted(found, key=lambda data: data != before)
    assert set(found) <= {before, after}


def _fails_at(number: int, source: Path, out: Path) -> bool:
    """Convert with the system refusing its n-th call; return whether there were as many."""
    calls = 0

    def refusing(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "mkdir", "rename", "replace"):
            patch.setattr(os, name, refusing(getattr(os, name)))
        try:
            convert(source, out, overwrite=True, verify=False)
        except OSError:
            return True
    return False
