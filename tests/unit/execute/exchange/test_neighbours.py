"""Which ranks share files: told by what each of them is on, and what it has open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from tensorferry import ReadOptions
from tensorferry.errors import LocateError
from tensorferry.execute.exchange import sharing, told_of
from tensorferry.execute.exchange.neighbours import boot
from tensorferry.storage.base import File, Storage
from tensorferry.storage.local import LocalStorage


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (["m a"], [(0, 1)]),
        (["m a", "m a"], [(0, 2), (1, 2)]),
        (["m a", "m b"], [(0, 1), (0, 1)]),
        (["m a", "n a"], [(0, 1), (0, 1)]),
        (["m a", "n a", "m a", "n a"], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (["m a b", "m b c", "m c"], [(0, 2), (1, 3), (1, 2)]),
        (["m", "m"], [(0, 1), (0, 1)]),
        (["m a", "", "m a"], [(0, 3), (1, 3), (2, 3)]),
    ],
)
def test_ranks_share_files_of_their_own_machine(told: list[str], found: list[tuple[int, int]]) -> None:
    assert [sharing(told, rank) for rank in range(len(told))] == found


@pytest.mark.skipif(not boot(), reason="this system does not say which machine it is")
class TestTelling:
    def test_a_file_is_the_same_by_whatever_name(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        (tmp_path / "one" / "f").write_bytes(b"x")
        os.link(tmp_path / "one" / "f", tmp_path / "two" / "g")
        with LocalStorage(tmp_path / "one") as one, LocalStorage(tmp_path / "two") as two:
            assert sharing([told_of(one, ["f"]), told_of(two, ["g"])], 1) == (1, 2)

    def test_a_copy_is_another_file(self, tmp_path: Path) -> None:
        for name in ("f", "g"):
            (tmp_path / name).write_bytes(b"x")
        with LocalStorage(tmp_path) as storage:
            assert sharing([told_of(storage, ["f"]), told_of(storage, ["g"])], 1) == (0, 1)
            assert told_of(storage, ["f", "f"]) == told_of(storage, ["f"])

    def test_a_file_that_is_gone_is_named(self, tmp_path: Path) -> None:
        with LocalStorage(tmp_path) as storage, pytest.raises(LocateError, match="gone"):
            told_of(storage, ["gone"])


def test_a_storage_that_knows_no_machine_says_nothing() -> None:
    class Remote:
        """Files by their names alone."""

        def stat(self, path: str) -> File:
            return File(path, 1, "an ETag")

    assert told_of(cast("Storage", Remote()), ["f"]) == ""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (ReadOptions(), (True, (1, 2))),
        (ReadOptions(shared=True), (True, (1, 2))),
        (ReadOptions(shared=False), (False, (0, 1))),
        (ReadOptions(turn=(3, 4)), (True, (3, 4))),
    ],
)
def test_what_is_found_is_used_where_nobody_says_otherwise(given: ReadOptions, found: Any) -> None:
    options = given.among(1, 2)
    assert (options.is_shared, options.settled_turn) == found


def test_a_rank_that_is_alone_shares_nothing_whatever_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ReadOptions().is_shared
    alone = ReadOptions().among(0, 1)
    assert (alone.is_shared, alone.settled_turn) == (False, (0, 1))
    assert ReadOptions(shared=True).among(0, 1).is_shared
