"""Hostile params.json and parts: refused in little time and memory, with the file's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import ar
from tensorferry.compat.consolidated import infer_config
from tensorferry.errors import CorruptFile, FormatError, LocateError, TensorferryError
from tensorferry.formats.opening import open_files
from tensorferry.formats.params_json import read_params
from tensorferry.storage.local import LocalStorage

TENSORS = {"layers.0.attention.wq.weight": ar(4, 4), "tok_embeddings.weight": ar(8, 4)}
SIZES: dict[str, Any] = {"dim": 4, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "vocab_size": 8}


def folder_of(path: Path, text: str) -> Path:
    torch.save(TENSORS, path / "consolidated.00.pth")
    (path / "params.json").write_text(text)
    return path


def described(folder: Path) -> None:
    """Make a configuration of what lies in `folder`."""
    with open_files(folder) as opened, LocalStorage(folder) as storage:
        params = read_params(storage)
        assert params is not None
        infer_config(params, opened.catalogue)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"dim": NaN}',
        '{"dim": 1e999}',
        '{"dim": 4, "dim": 5}',
        '{"dim": ' + "9" * 5000 + "}",
        '{"model": ' * 200 + "{}" + "}" * 200,
        '{"dim": "' + "4" * 5000 + '"}',
        '{"pad": "' + "x" * (2 << 20) + '"}',
    ],
    ids=["empty", "list", "open", "nan", "infinite", "twice", "digits", "deep", "text", "large"],
)
def test_what_is_no_plain_object_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(CorruptFile, match=r"params\.json"):
        open_files(folder_of(tmp_path, text))


@pytest.mark.parametrize(
    "more",
    [
        {"n_layers": 2**30},
        {"n_layers": 2**31 - 1, "sliding_window": [None, 4]},
        {"n_heads": 2**30},
        {"dim": 2**30, "multiple_of": 1},
        {"ffn_dim_multiplier": 1e300, "hidden_dim": None, "multiple_of": 1},
        {"yarn": {"factor": -1, "original_max_position_embeddings": 1}},
        {"rope_theta": {}},
        {"activation": []},
        {"sliding_window": ["x"] * 1000},
        {"\x1b[31mnew": "\x1b[31m", "model_type": "\x1b[31m"},
    ],
)
def test_impossible_values_take_no_memory_and_never_reach_a_terminal_raw(tmp_path: Path, more: dict[str, Any]) -> None:
    folder_of(tmp_path, json.dumps({**SIZES, **more}))
    with pytest.raises(TensorferryError) as refused:
        described(tmp_path)
    assert "\x1b" not in str(refused.value)


def test_a_params_json_that_leads_out_of_its_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"dim": 4}')
    folder = tmp_path / "m"
    folder.mkdir()
    folder_of(folder, "{}")
    (folder / "params.json").unlink()
    (folder / "params.json").symlink_to(tmp_path / "secret")
    with pytest.raises(FormatError, match=r"params\.json"):
        open_files(folder)


def test_a_file_of_a_huge_number_asks_for_no_list_of_all_before_it(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "consolidated.9999.pth")
    with pytest.raises(LocateError, match=r"consolidated\.0000\.pth.* and 9,995 more"):
        open_files(tmp_path)


def test_one_part_twice_is_a_choice_to_be_made(tmp_path: Path) -> None:
    for name in ("consolidated.0.pth", "consolidated.00.pth"):
        torch.save(TENSORS, tmp_path / name)
    with pytest.raises(FormatError, match=r"consolidated\.0\.pth and consolidated\.00\.pth are the same part"):
        open_files(tmp_path)


def test_an_odd_activation_is_not_passed_on(tmp_path: Path) -> None:
    folder_of(tmp_path, json.dumps({**SIZES, "activation": {"a": 1}}))
    with pytest.raises(CorruptFile, match="activation: a word is expected"):
        described(tmp_path)
