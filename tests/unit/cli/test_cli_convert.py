"""What ``convert`` prints, and how its options are what `tensorferry.convert` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import ar, write_safetensors
from helpers.command_line import CommandLine
from tensorferry.core.amounts import human_bytes


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {"layers.0.w": ar(2, 3), "layers.1.w": ar(2, 3), "n": ar(2, dtype=torch.int64)}
    return write_safetensors(tmp_path / "src" / "model.safetensors", tensors).parent


def test_it_prints_the_account(run: CommandLine, source: Path, tmp_path: Path) -> None:
    ran = run("convert", source, tmp_path / "out", "--dtype", "bf16", "--quiet")
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert lines[:5] == [
        f"wrote 3 tensors, 40 B, to {tmp_path / 'out'} (safetensors)",
        f"  of {source} (safetensors)",
        f"  model.safetensors: {human_bytes(size)}",
        "  cast 2 tensors F32 -> BF16",
        "  not cast (integers): n",
    ]
    assert lines[5].endswith("; 3 tensors, 40 B, read back and equal")
    assert load_file(tmp_path / "out" / "model.safetensors")["layers.0.w"].dtype == torch.bfloat16


def test_progress_goes_to_standard_error(run: CommandLine, source: Path, tmp_path: Path) -> None:
    ran = run("convert", source, tmp_path / "out")
    assert [line.split(":")[0] for line in ran.err.splitlines()] == ["converting", "reading back"]


def test_json_is_the_account_as_data(run: CommandLine, source: Path, tmp_path: Path) -> None:
    ran = run("convert", source, tmp_path / "out", "--json", "--quiet", "--no-verify", "--max-shard-size", "30")
    told = json.loads(ran.out)
    assert told["verified"] == "not read back"
    assert sorted(told["files"]) == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(told["files"]) == 4


def test_a_dry_run_writes_nothing(run: CommandLine, source: Path, tmp_path: Path) -> None:
    ran = run("convert", source, tmp_path / "out", "--dry-run", "--quiet")
    assert ran.out.startswith("would write 3 tensors, 64 B, to ")
    assert not (tmp_path / "out").exists()


def test_to_another_format_with_digests(run: CommandLine, source: Path, tmp_path: Path) -> None:
    ran = run("convert", source, tmp_path / "out", "--to", "tensorizer", "--sha256sums", "--quiet")
    assert ran.status == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["SHA256SUMS", "model.tensors"]
    assert run("verify", tmp_path / "out", "--manifest", tmp_path / "out" / "SHA256SUMS", "--quiet").status == 0


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--to", "gguf"], 1, "nothing here writes 'gguf'"),
        (["--max-shard-size", "many"], 2, "--max-shard-size 'many': a number of bytes is expected"),
        (["--dtype", "int3"], 2, "dtype 'int3': one of"),
        (["--names", "x"], 2, "names 'x': one of auto, hf, keep is expected"),
    ],
)
def test_a_call_that_cannot_be_is_said_in_one_paragraph(
    run: CommandLine, source: Path, tmp_path: Path, options: list[str], status: int, said: str
) -> None:
    ran = run("convert", source, tmp_path / "out", *options)
    assert (ran.status, ran.out) == (status, "")
    assert said in ran.err


def test_advice_is_given_in_options(run: CommandLine, source: Path, tmp_path: Path) -> None:
    run("convert", source, tmp_path / "out", "--quiet")
    ran = run("convert", source, tmp_path / "out", "--quiet")
    assert ran.status == 2
    assert ran.err.endswith("is there already: give another name, or replace it with --overwrite\n")
    assert run("convert", source, tmp_path / "out", "--overwrite", "--quiet").status == 0


def test_values_that_overflow_stop_it_unless_that_is_allowed(run: CommandLine, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "src" / "model.safetensors", {"w": torch.tensor([1e6])})
    command = ["convert", str(tmp_path / "src"), str(tmp_path / "out"), "--dtype", "fp16", "--quiet"]
    ran = run(*command)
    assert ran.status == 1
    assert "or pass --allow-lossy; nothing was written" in ran.err
    ran = run(*command, "--allow-lossy")
    assert "  w: 1 overflow, 0 underflow" in ran.out.splitlines()
