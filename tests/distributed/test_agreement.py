"""If one rank fails, all raise the same error soon, and none hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.ranks import Fault, Ranks
from helpers.tiny_transformers import saved
from tensorferry import ParallelConfig, ReadError, load_model
from tensorferry.storage.local import LocalStorage

pytestmark = pytest.mark.transformers


def load_from(rank: int, size: int, folders: list[Path]) -> str:
    load_model(folders[rank], parallel=ParallelConfig(tp_size=size, tp_rank=rank))
    return "loaded"


def load_with_a_bad_disk(rank: int, size: int, folder: Path, bad: int, after: int) -> str:
    """Let reading fail in rank `bad`, after so many good reads."""
    reads = 0
    original = LocalStorage.read_vector

    def failing(self: LocalStorage, path: str, offset: int, outs: Any) -> None:
        nonlocal reads
        reads += 1
        if rank == bad and reads > after:
            raise ReadError(f"{path}: the disk is broken")
        original(self, path, offset, outs)

    LocalStorage.read_vector = failing  # type: ignore[method-assign]
    try:
        return load_from(rank, size, [folder] * size)
    finally:
        LocalStorage.read_vector = original  # type: ignore[method-assign]


def same(faults: list[Any]) -> Fault:
    assert all(isinstance(fault, Fault) for fault in faults)
    kinds_and_words = {(fault.kind, fault.words) for fault in faults}
    assert len(kinds_and_words) == 1
    first: Fault = faults[0]
    return first


def test_a_rank_whose_files_are_damaged_stops_all_before_anything_is_touched(two_ranks: Ranks, tmp_path: Path) -> None:
    good, bad = saved("Llama", tmp_path / "good"), saved("Llama", tmp_path / "bad")
    file = bad / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    fault = same(two_ranks.tried(load_from, [good, bad]))
    assert fault.kind == "CorruptFile"
    assert fault.words.startswith("rank 1 of 2: model.safetensors")
    assert not fault.touched


def test_a_rank_that_fails_while_it_reads_stops_all(four_ranks: Ranks, tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path)
    fault = same(four_ranks.tried(load_with_a_bad_disk, folder, 2, 1))
    assert fault.kind == "ReadError"
    assert fault.words.startswith("rank 2 of 4: ")
    assert "the disk is broken" in fault.words


def test_ranks_go_on_after_a_failure(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path)
    same(two_ranks.tried(load_from, [folder, tmp_path / "nothing"]))
    assert two_ranks.run(load_from, [folder, folder]) == ["loaded", "loaded"]
