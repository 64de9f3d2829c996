"""Runs of bytes at equal distances: what comes, how it is counted, and what is announced to the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.memory_storage import MemoryStorage
from tensorferry.errors import ReadError
from tensorferry.storage.joined import JoinedStorage
from tensorferry.storage.local import LocalStorage
from tensorferry.storage.reading import read_runs
from tensorferry.storage.runs import fill_runs

DATA = bytes(range(100))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(DATA)
    return tmp_path / "f"


def test_runs_come_one_after_the_other(file: Path) -> None:
    out = bytearray(6)
    with LocalStorage(file.parent) as storage:
        storage.read_runs("f", 10, 30, 2, memoryview(out))
        assert bytes(out) == bytes([10, 11, 40, 41, 70, 71])
        assert (storage.counters.bytes_read, storage.counters.reads) == (6, 3)


def test_a_storage_that_has_no_way_of_its_own_is_asked_run_by_run() -> None:
    storage, out = MemoryStorage({"f": DATA}), bytearray(6)
    read_runs(storage, "f", 10, 30, 2, memoryview(out))
    assert bytes(out) == bytes([10, 11, 40, 41, 70, 71])
    assert storage.reads == [("f", 10, 2), ("f", 40, 2), ("f", 70, 2)]


def test_joined_storages_pass_runs_on_to_the_part(file: Path) -> None:
    out = bytearray(4)
    with LocalStorage(file.parent) as part:
        read_runs(JoinedStorage({"part": part}), "part/f", 0, 50, 2, memoryview(out))
        assert part.counters.reads == 2
    assert bytes(out) == bytes([0, 1, 50, 51])


def test_a_file_that_ends_early_is_told_with_the_run_that_is_short(file: Path) -> None:
    with LocalStorage(file.parent) as storage:
        with pytest.raises(ReadError, match=r"f .*: ends inside a read: wanted 4 bytes at offset 98, got 2"):
            storage.read_runs("f", 8, 30, 4, memoryview(bytearray(16)))
        with pytest.raises(ReadError, match="are no part of any file"):
            storage.read_runs("f", -1, 30, 4, memoryview(bytearray(16)))


def test_runs_of_a_file_that_is_not_in_memory_are_announced_before_they_are_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError
        seen.append(("read", offset))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: seen.append(("announced", offset)))
    with file.open("rb") as opened:
        assert fill_runs(opened.fileno(), 0, 40, 2, memoryview(bytearray(6))) == 6
    offsets = [0, 40, 80]
    assert seen == [("announced", at) for at in offsets] + [("read", at) for at in offsets]


def test_runs_of_a_file_that_is_in_memory_are_not_announced(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorferry.storage.runs._is_cached", lambda fd, offset, run: True)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: pytest.fail("announced"))
    with file.open("rb") as opened:
        assert fill_runs(opened.fileno(), 0, 40, 2, memoryview(bytearray(6))) == 6
