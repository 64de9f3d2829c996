"""What ``verify`` prints, and against what it compares."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from helpers.checkpoints import ar, write_safetensors
from helpers.command_line import CommandLine


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_digests_are_printed_as_sha256sum_writes_them(run: CommandLine, file: Path) -> None:
    ran = run("verify", file.parent, "--quiet")
    assert (ran.status, ran.err) == (0, "")
    head, line = ran.out.splitlines()
    assert head == (
        f"{file.parent}: 1 tensor, 8 B (safetensors); contents read, not verified: there was no digest to compare with"
    )
    assert line == f"  {sha256(file)}  model.safetensors"


def test_progress_goes_to_standard_error(run: CommandLine, file: Path) -> None:
    ran = run("verify", file.parent)
    assert ran.err.startswith("verifying: 100% (")
    assert "verifying" not in ran.out


def test_a_manifest_that_agrees_is_status_0(run: CommandLine, file: Path) -> None:
    (file.parent / "sums").write_text(f"{sha256(file)}  model.safetensors\n")
    ran = run("verify", file.parent, "--manifest", file.parent / "sums")
    assert ran.status == 0
    assert "sha256 of 1 of 1 files verified against the manifest" in ran.out


def test_a_manifest_that_differs_is_status_1_with_both_digests(run: CommandLine, file: Path) -> None:
    (file.parent / "sums").write_text(f"{'0' * 64}  model.safetensors\n")
    ran = run("verify", file.parent, "--manifest", file.parent / "sums", "--quiet")
    assert (ran.status, ran.out) == (1, "")
    assert f"sha256 is {sha256(file)}, but the manifest says {'0' * 64}" in ran.err


def test_a_manifest_that_is_not_there_is_status_1(run: CommandLine, file: Path) -> None:
    assert run("verify", file.parent, "--manifest", "absent").status == 1


def test_json_is_the_account_of_every_file(run: CommandLine, file: Path) -> None:
    data = json.loads(run("verify", file, "--json").out)
    assert data == {
        "source": str(file.parent),
        "format": "safetensors",
        "tensors": 1,
        "nbytes": 8,
        "files": [
            {
                "path": "model.safetensors",
                "size": file.stat().st_size,
                "sha256": sha256(file),
                "against": "",
                "checksummed": 0,
            }
        ],
        "warnings": [],
        "summary": "contents read, not verified: there was no digest to compare with",
    }
