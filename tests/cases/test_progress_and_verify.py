"""Reported failures of progress and verifying: bars in logs, a bar per rank, and bytes that nobody looked at."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, raw, write_index, write_safetensors
from tensorferry.api import load
from tensorferry.errors import CorruptFile
from tensorferry.verify import verify


def in_a_child(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run `code` in a child process whose outputs are pipes."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, check=False, env={**os.environ, **environment})


LOAD = """
import sys, torch
from tensorferry import load
from tensorferry.progress import for_stream
torch.set_num_threads(1)
tensors = {f"w{n}": torch.nn.Parameter(torch.empty(4, device="meta")) for n in range(100)}
load(torch.nn.ParameterDict(tensors), sys.argv[1], progress=for_stream(), verify=True)
"""

VERIFY = """
import sys
from tensorferry import verify
from tensorferry.progress import for_stream
verify(sys.argv[1], progress=for_stream())
"""


def sharded(folder: Path, shards: int) -> Path:
    """Write a checkpoint of one tensor of four elements per shard."""
    names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    for n, name in enumerate(names):
        write_safetensors(folder / name, {f"w{n}": ar(4)})
    write_index(folder / "model.safetensors.index.json", {f"w{n}": name for n, name in enumerate(names)})
    return folder


def test_run_07_a_hundred_shards_into_a_pipe_are_at_most_twelve_ascii_lines(tmp_path: Path) -> None:
    done = in_a_child(LOAD, str(sharded(tmp_path, 100)))
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert 1 <= len(done.stderr.splitlines()) <= 12
    assert b"\r" not in done.stderr
    assert done.stderr.isascii()
    assert b"weights: 100% (1.6 KiB of 1.6 KiB)" in done.stderr


def test_run_08_of_four_ranks_only_rank_0_writes_progress(tmp_path: Path) -> None:
    folder = str(sharded(tmp_path, 2))
    said = [in_a_child(VERIFY, folder, RANK=str(rank), WORLD_SIZE="4").stderr for rank in range(4)]
    assert [bool(text) for text in said] == [True, False, False, False]


def test_run_08_every_rank_tells_of_errors(tmp_path: Path) -> None:
    folder = sharded(tmp_path, 2)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model-00002-of-00002.safetensors\n")
    done = [in_a_child(VERIFY, str(folder), RANK=str(rank), WORLD_SIZE="4") for rank in range(4)]
    assert all(d.returncode == 1 and b"model-00002-of-00002.safetensors: sha256 is" in d.stderr for d in done)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A hub cache with one file, whose blob is called by its sha256."""
    repository = tmp_path / "models--some--model"
    file = write_safetensors(tmp_path / "model.safetensors", {"w": ar(4)})
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (repository / "blobs").mkdir(parents=True)
    file.rename(repository / "blobs" / digest)
    folder = repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    return folder


def damage(snapshot: Path) -> str:
    """Flip a byte of the values in the blob, whose size stays; return its new sha256."""
    blob = (snapshot / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 0x01
    blob.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


class Tiny(nn.Module):
    """A model of one parameter, in memory already."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))


def test_corr_15_verifying_finds_a_flipped_byte_and_tells_both_digests(snapshot: Path) -> None:
    expected, found = (snapshot / "model.safetensors").resolve().name, damage(snapshot)
    for check in (lambda: verify(snapshot), lambda: load(Tiny(), snapshot, verify=True)):
        with pytest.raises(CorruptFile) as caught:
            check()
        assert f"sha256 is {found}, but the hub's blob name says {expected}" in str(caught.value)
        assert "model.safetensors" in str(caught.value)


def test_corr_15_a_model_is_not_touched_by_bytes_that_fail(snapshot: Path) -> None:
    damage(snapshot)
    model = Tiny()
    with pytest.raises(CorruptFile) as caught:
        load(model, snapshot, verify=True)
    assert not caught.value.touched
    assert model.w.tolist() == [0, 0, 0, 0]


def test_corr_15_without_verifying_it_loads_and_the_report_says_so(snapshot: Path) -> None:
    damage(snapshot)
    model = Tiny()
    report = load(model, snapshot)
    assert raw(model.w.detach())[:12] == raw(ar(4))[:12]
    assert report.verified == "contents not verified"
    assert "contents not verified" in str(report)


def test_corr_15_whole_bytes_pass_and_the_report_says_against_what(snapshot: Path) -> None:
    report = load(Tiny(), snapshot, verify=True)
    assert report.verified == "sha256 of 1 of 1 files verified against the hub's blob name"
