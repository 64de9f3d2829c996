"""What ``inspect`` shows of a checkpoint, to people and to programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import ar, write_index, write_raw_safetensors, write_safetensors
from helpers.command_line import CommandLine
from tensorferry import ReadOptions
from tensorferry.cli.inspecting import inspection
from tensorferry.core.catalogue import Catalogue, Chunk, TensorEntry
from tensorferry.core.dtypes import DTYPES

HOSTILE = "w\x1b]0;owned\x07\r\n\x1b[2J\u202e"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """Twelve layers in two shards, with an optimizer's state beside them."""
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    first = {f"h.{n}.w": ar(2, 3) for n in range(12)}
    second = {"head": ar(4, dtype=torch.bfloat16)}
    write_safetensors(tmp_path / shards[0], first)
    write_safetensors(tmp_path / shards[1], second)
    write_index(
        tmp_path / "model.safetensors.index.json", dict.fromkeys(first, shards[0]) | dict.fromkeys(second, shards[1])
    )
    (tmp_path / "optimizer.pt").write_bytes(b"not looked at")
    return tmp_path


def document(run: CommandLine, *arguments: str | Path) -> dict[str, Any]:
    ran = run("inspect", *arguments, "--json")
    assert (ran.status, ran.err) == (0, "")
    data: dict[str, Any] = json.loads(ran.out)
    return data


def test_the_first_line_says_format_files_tensors_and_bytes(run: CommandLine, layers: Path) -> None:
    ran = run("inspect", layers)
    assert ran.status == 0
    assert ran.out.splitlines()[0] == f"{layers}: safetensors, 2 files, 13 tensors, 296 B"


def test_layers_are_folded_into_a_line(run: CommandLine, layers: Path) -> None:
    assert "h.{0..11}.w  12 x F32 [2, 3]       288 B" in run("inspect", layers).out


def test_every_tensor_has_a_line_where_that_is_asked_for(run: CommandLine, layers: Path) -> None:
    out = run("inspect", layers, "--all").out
    assert all(f"h.{n}.w " in out for n in range(12))


def test_bytes_are_told_by_type(run: CommandLine, layers: Path) -> None:
    assert "types: F32 288 B, BF16 8 B" in run("inspect", layers).out


def test_the_choice_of_files_is_told_with_its_reason_and_what_was_left_out(run: CommandLine, layers: Path) -> None:
    out = run("inspect", layers).out
    assert "files: model.safetensors.index.json names 2 files" in out
    assert "not used: optimizer.pt (" in out


def test_metadata_is_shown(run: CommandLine, layers: Path) -> None:
    assert "metadata: format = pt" in run("inspect", layers).out


def test_only_tensors_of_a_pattern_are_shown_where_one_is_given(run: CommandLine, layers: Path) -> None:
    assert [t["name"] for t in document(run, layers, "--tensors", "h.1*")["tensors"]] == ["h.1.w", "h.10.w", "h.11.w"]
    assert "head" not in run("inspect", layers, "--tensors", "h.*").out


def test_a_pattern_that_nothing_matches_is_said(run: CommandLine, layers: Path) -> None:
    ran = run("inspect", layers, "--tensors", "nothing")
    assert (ran.status, "no tensor matches" in ran.out) == (0, True)


def test_a_single_file_can_be_inspected(run: CommandLine, layers: Path) -> None:
    data = document(run, layers / "model-00002-of-00002.safetensors")
    assert [t["name"] for t in data["tensors"]] == ["head"]


def test_a_checkpoint_without_tensors_can_be_inspected(run: CommandLine, tmp_path: Path) -> None:
    write_raw_safetensors(tmp_path / "model.safetensors", [])
    out = run("inspect", tmp_path).out
    assert "0 tensors, 0 B" in out
    assert "types: none" in out


def test_patterns_of_files_choose_what_is_inspected(run: CommandLine, layers: Path) -> None:
    data = document(run, layers, "--allow", "*-00002-of-*", "--ignore", "*.index.json")
    assert [f["path"] for f in data["files"]] == ["model-00002-of-00002.safetensors"]


def test_json_has_these_keys_and_no_others(run: CommandLine, layers: Path) -> None:
    data = document(run, layers)
    assert set(data) == {
        "source", "format", "selection", "index", "files", "ignored", "metadata", "warnings", "nbytes",
        "storage_kind", "tensors",
    }  # fmt: skip
    assert set(data["files"][0]) == {"path", "size"}
    assert set(data["ignored"][0]) == {"path", "reason"}
    keys = {"name", "dtype", "shape", "file", "offset", "nbytes", "strides"}
    assert all(set(tensor) == keys for tensor in data["tensors"])


def test_json_says_where_the_bytes_of_a_tensor_are(run: CommandLine, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"a": ar(2, 3), "b": ar(4, start=7)})
    (b,) = document(run, path, "--tensors", "b")["tensors"]
    assert (b["dtype"], b["shape"], b["nbytes"], b["file"], b["strides"]) == ("F32", [4], 16, "model.safetensors", None)
    there = path.read_bytes()[b["offset"] : b["offset"] + b["nbytes"]]
    assert there == ar(4, start=7).numpy().tobytes()


def test_json_gives_the_strides_of_a_tensor_that_is_not_row_major(run: CommandLine, tmp_path: Path) -> None:
    torch.save({"w": ar(2, 3).T}, tmp_path / "pytorch_model.bin")
    (w,) = document(run, tmp_path)["tensors"]
    assert (w["shape"], w["strides"]) == ([3, 2], [1, 3])


def test_json_names_the_index_or_none(run: CommandLine, layers: Path) -> None:
    assert document(run, layers)["index"] == "model.safetensors.index.json"
    assert document(run, layers / "model-00001-of-00002.safetensors")["index"] is None


def test_json_of_a_tensor_that_is_no_span_has_all_keys() -> None:
    class Stub:
        uri = "there"
        warnings = ()
        options = ReadOptions()
        catalogue = Catalogue([TensorEntry("w", DTYPES["F32"], (2,), (Chunk(None, None),))], format="packed")

        class selection:  # noqa: N801
            reason, index_file, files, ignored = "one file", None, (), ()

    (w,) = inspection(Stub())["tensors"]  # type: ignore[arg-type]
    assert (w["file"], w["offset"], w["nbytes"]) == (None, None, 8)


def test_hostile_names_of_tensors_and_hostile_metadata_do_not_reach_the_terminal(
    run: CommandLine, tmp_path: Path
) -> None:
    header = {
        "__metadata__": {HOSTILE: HOSTILE},
        HOSTILE: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    }
    write_raw_safetensors(tmp_path / "model.safetensors", [("w", "U8", [1], b"\1")], header_text=json.dumps(header))
    for extra in ((), ("--all",)):
        out = run("inspect", tmp_path, *extra).out
        assert all(line.isprintable() for line in out.splitlines())
        assert "w\\x1b]0;owned\\x07\\r\\n\\x1b[2J\\u202e  U8 [1]" in out
        assert "metadata: w\\x1b]0;owned" in out


def test_json_gives_hostile_names_as_they_are_in_harmless_letters(run: CommandLine, tmp_path: Path) -> None:
    header = {HOSTILE: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    write_raw_safetensors(tmp_path / "model.safetensors", [("w", "U8", [1], b"\1")], header_text=json.dumps(header))
    ran = run("inspect", tmp_path, "--json")
    assert ran.out.strip().isprintable()
    assert json.loads(ran.out)["tensors"][0]["name"] == HOSTILE


def test_hostile_names_of_files_and_folders_do_not_reach_the_terminal(run: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "f\x1b[31m\n"
    write_safetensors(folder / "model.safetensors", {"w": ar(1)})
    write_safetensors(folder / "adapter\x1b[2J\r\n.safetensors", {"v": ar(1)})
    out = run("inspect", folder).out
    assert all(line.isprintable() for line in out.splitlines())
    assert "f\\x1b[31m\\n: safetensors, " in out


def test_hostile_names_do_not_reach_the_terminal_in_errors(run: CommandLine, tmp_path: Path) -> None:
    for name in ("no\x1b[31m", "no\nsuch\r\nfolder"):
        err = run("inspect", tmp_path / name).err
        assert all(line.isprintable() for line in err.splitlines())
    (tmp_path / "bad\x1b[2J.safetensors").write_bytes(b"short")
    err = run("inspect", tmp_path).err
    assert all(line.isprintable() for line in err.splitlines())
    assert "bad\\x1b[2J.safetensors" in err


def test_names_that_are_not_utf8_can_be_shown(run: CommandLine, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"w": ar(1)})
    odd = path.rename(tmp_path / "model\udcff.safetensors")
    assert "model\\udcff.safetensors" in run("inspect", odd, "--json").out
    assert run("inspect", odd).status == 0


def test_inspect_imports_neither_torch_nor_rich_nor_the_reader_of_another_format(layers: Path) -> None:
    code = (
        "import sys\nfrom tensorferry.cli.main import main\n"
        "try: main(['inspect', sys.argv[1]])\n"
        "finally: print({'torch', 'rich', 'numpy', 'tensorferry.formats.torch_file'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(layers)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
