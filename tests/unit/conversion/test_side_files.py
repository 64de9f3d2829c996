"""What goes along beside the weights: configuration, tokenizer, templates and code, and what does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import ar, write_safetensors
from tensorferry import CorruptFile, UnsafeFile, convert

CONFIG = {
    "model_type": "x", "dtype": "float32", "rms": 1e-06, "big": 2**60, "ünï": "☃",
    "text_config": {"torch_dtype": "float32", "depth": 3}, "quantization_config": {"dtype": "float32"},
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    src = write_safetensors(tmp_path / "src" / "model.safetensors", {"w": ar(2)}).parent
    (src / "config.json").write_text(json.dumps(CONFIG))
    for name in ("generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "modeling_x.py"):
        (src / name).write_text(f"of {name}")
    (src / "1_Pooling").mkdir()
    (src / "1_Pooling" / "config.json").write_text("pooling")
    (src / "onnx").mkdir()
    (src / "onnx" / "model.onnx").write_bytes(b"x")
    (src / "onnx" / "config.json").write_text("of onnx")
    for name in ("README.md", ".gitattributes", "SHA256SUMS", "training_args.bin", "tensorferry-sharded-state-x.json"):
        (src / name).write_text("")
    return src


def written(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


GOES_ALONG = {
    "config.json", "generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "modeling_x.py",
    "1_Pooling/config.json",
}  # fmt: skip


def test_small_files_go_along_and_pages_weights_and_digests_do_not(source: Path, tmp_path: Path) -> None:
    account = convert(source, tmp_path / "out")
    assert written(tmp_path / "out") == {"model.safetensors", *GOES_ALONG}
    assert dict(account.side_files) == dict.fromkeys(GOES_ALONG, "as it is")
    assert dict(account.left_behind) == {"SHA256SUMS": "digests of other files", "training_args.bin": "training state"}


def test_what_goes_along_is_the_same_byte_for_byte(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    assert all((tmp_path / "out" / name).read_bytes() == (source / name).read_bytes() for name in GOES_ALONG)


def test_a_file_that_was_named_takes_only_files_of_a_model_along(source: Path, tmp_path: Path) -> None:
    (source / "diary.txt").write_text("private")
    convert(source / "model.safetensors", tmp_path / "out")
    found = {"config.json", "generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"}
    assert written(tmp_path / "out") == {"model.safetensors", *found}


def test_the_configuration_says_the_new_type_and_keeps_everything_else(source: Path, tmp_path: Path) -> None:
    account = convert(source, tmp_path / "out", dtype="bfloat16")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    text = {**CONFIG["text_config"], "torch_dtype": "bfloat16"}  # type: ignore[dict-item]
    assert found == {**CONFIG, "dtype": "bfloat16", "text_config": text}
    assert account.side_files["config.json"] == "changed"


def test_a_configuration_without_a_type_gets_one_where_a_type_was_asked_for(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text("{}")
    convert(source, tmp_path / "out", dtype="float16")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "float16"}


@pytest.mark.transformers
def test_transformers_reads_the_type_of_either_name(source: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config: dict[str, Any] = {"model_type": "llama"}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out", dtype="float16")
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.float16


def test_a_configuration_that_is_no_json_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"config.json \(.*is no JSON"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_modes_are_those_of_the_umask_whatever_the_sources_are(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").chmod(0o400)
    old = os.umask(0o027)
    try:
        convert(source, tmp_path / "out")
    finally:
        os.umask(old)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()}
    folders = {path.stat().st_mode & 0o777 for path in (tmp_path / "out", tmp_path / "out" / "1_Pooling")}
    assert (modes, folders) == ({0o640}, {0o750})


def test_a_link_that_leads_out_of_the_source_is_not_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("secret")
    (source / "1_Pooling" / "x.json").symlink_to(tmp_path / "secret.json")
    convert(source, tmp_path / "out")
    assert "1_Pooling/x.json" not in written(tmp_path / "out")


def test_what_cannot_be_copied_stays_behind_and_is_told(source: Path, tmp_path: Path) -> None:
    (source / "vocab.json").symlink_to("absent.json")
    os.mkfifo(source / "vocab.txt")
    account = convert(source, tmp_path / "out")
    assert written(tmp_path / "out") == {"model.safetensors", *GOES_ALONG}
    assert account.left_behind["vocab.json"] == "a broken link, to absent.json"
    assert account.left_behind["vocab.txt"] == "a pipe, a socket or a device"


def test_a_file_that_leads_out_of_the_source_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.json").write_text("secret")
    (source / "vocab.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(UnsafeFile, match=r"vocab.json .*leads out of its folder"):
        convert(source, tmp_path / "out", dry_run=True)


def test_a_configuration_with_half_a_surrogate_pair_is_written_as_json_that_others_read(
    source: Path, tmp_path: Path
) -> None:
    (source / "config.json").write_text('{"name": "\\ud800"}')
    convert(source, tmp_path / "out", dtype="float16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["name"] == "\ud800"
