"""Few file descriptors: what a process may open is far less than what a checkpoint has in shards."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import ar, write_safetensors
from tensorferry import load, open_checkpoint, verify
from tensorferry.errors import ReadError
from tensorferry.storage.base import Uncached
from tensorferry.storage.local import LocalStorage

SHARDS = 60


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@contextmanager
def may_open(more: int) -> Iterator[None]:
    """Let this process open only so many files beyond those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (number for number in count() if not is_open(number))
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, more, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for n in range(1, SHARDS + 1):
        write_safetensors(tmp_path / f"model-{n:05d}-of-{SHARDS:05d}.safetensors", {f"t{n}": ar(2, start=n)})
    return tmp_path


def test_more_shards_than_descriptors_are_read(sharded: Path) -> None:
    with may_open(12), open_checkpoint(sharded) as checkpoint:
        assert {name: values[0].item() for name, values in checkpoint.tensors()} == {
            f"t{n}": n for n in range(1, SHARDS + 1)
        }


def test_more_shards_than_descriptors_are_verified(sharded: Path) -> None:
    with may_open(12):
        assert len(verify(sharded).files) == SHARDS


def test_files_that_are_not_in_use_give_way_when_the_process_has_no_descriptor_left(tmp_path: Path) -> None:
    for n in range(9):
        (tmp_path / f"{n}").write_bytes(bytes([n]))
    out = bytearray(1)
    with LocalStorage(tmp_path) as storage, may_open(4):
        for n in range(9):
            storage.read_into(f"{n}", 0, memoryview(out))
            assert out[0] == n


def test_mappings_each_need_a_descriptor_and_the_error_says_what_to_do(sharded: Path) -> None:
    with (
        may_open(12),
        open_checkpoint(sharded) as checkpoint,
        pytest.raises(ReadError, match=r"cannot be mapped: Too many open files: .*ulimit -n"),
    ):
        list(checkpoint.tensors(mapped=True))


def test_a_process_that_can_open_nothing_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"x")
    with LocalStorage(tmp_path) as storage, may_open(0), pytest.raises(ReadError, match=r"w \(.*Too many open files"):
        storage.read_into("w", 0, memoryview(bytearray(1)))


def test_a_file_with_the_last_descriptor_is_read_through_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"x" * 4096)
    out = bytearray(4096)
    with LocalStorage(tmp_path) as storage:
        with may_open(1):
            assert storage.uncached("w") == Uncached(False, "too many files are open")
            assert storage.read_uncached("w", 0, [memoryview(out)]) is None
            storage.read_into("w", 0, memoryview(out))
        assert out == b"x" * 4096
        assert "too many" not in storage.uncached("w").why, "it is asked again"


def test_a_model_is_loaded_with_one_descriptor(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(2, 3), "bias": ar(2, start=9)})
    model = torch.nn.Linear(3, 2)
    with open_checkpoint(tmp_path) as checkpoint, may_open(1):
        load(model, checkpoint)
    assert torch.equal(model.weight.data, ar(2, 3))
