"""Names out of files in logs and messages: what would steer a terminal never gets there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_index, write_safetensors
from tensorferry import Strictness, load, open_checkpoint, verify
from tensorferry.errors import TensorferryError

EVIL = "\x1b[31m\n\u202e"
SHARDS = [f"{EVIL}-00001-of-00002.safetensors", f"{EVIL}-00002-of-00002.safetensors"]
INDEX = f"{EVIL}.safetensors.index.json"


def weights(folder: Path) -> None:
    write_safetensors(folder / f"{EVIL}.safetensors", {EVIL: ar(2), "other": ar(3)})
    write_safetensors(folder / f"adapter_{EVIL}.safetensors", {"w": ar(1)})


def torch_file(folder: Path) -> None:
    torch.save({"state_dict": {EVIL: ar(2)}, f"more{EVIL}": 3}, folder / f"{EVIL}.pt")


def twice(folder: Path) -> None:
    for shard in SHARDS:
        write_safetensors(folder / shard, {EVIL: ar(2)})


def twice_and_different(folder: Path) -> None:
    for n, shard in enumerate(SHARDS):
        write_safetensors(folder / shard, {EVIL: ar(2, start=n)})


def an_index(folder: Path) -> None:
    write_safetensors(folder / SHARDS[0], {EVIL: ar(2), f"more{EVIL}": ar(1)})
    write_index(folder / INDEX, {EVIL: SHARDS[0]})


def an_index_of_others(folder: Path) -> None:
    write_safetensors(folder / SHARDS[0], {EVIL: ar(2)})
    write_index(folder / INDEX, {f"absent{EVIL}": SHARDS[0]})


def a_stale_index(folder: Path) -> None:
    write_safetensors(folder / f"x{EVIL}.safetensors", {EVIL: ar(2)})
    write_index(folder / INDEX, {EVIL: f"gone{EVIL}.safetensors"})


def a_damaged_index(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {EVIL: EVIL}})[:-3])


def an_index_of_two_sets(folder: Path) -> None:
    write_index(folder / INDEX, {"a": SHARDS[0], "b": f"{EVIL}-00001-of-00003.safetensors"})


def a_manifest(folder: Path) -> None:
    weights(folder)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {EVIL.replace(chr(10), '')}.safetensors\n")


FOLDERS = [
    weights, torch_file, twice, twice_and_different, an_index, an_index_of_others, a_stale_index, a_damaged_index,
    an_index_of_two_sets, a_manifest,
]  # fmt: skip


@pytest.mark.parametrize("write", FOLDERS)
def test_nothing_that_steers_a_terminal_is_logged_or_said(
    write: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / f"folder{EVIL}"
    folder.mkdir()
    write(folder)
    caplog.set_level(logging.DEBUG, "tensorferry")
    said = []
    for act in (open_checkpoint, verify, lambda path: load(Named(), path, strict=Strictness(missing="warn"))):
        try:
            said.append(str(act(folder)))
        except TensorferryError as error:
            said.append(str(error))
    said += [record.getMessage() for record in caplog.records]
    lines = [line for text in said for line in text.split("\n")]
    assert [line for line in lines if not line.isprintable()] == []
    assert [line for line in lines if line.startswith((".", "-", "\u202e"))] == []  # what follows a line feed in a name


class Named(nn.Module):
    """Has a parameter that is called like the tensor, of a type that it has to be cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(EVIL, nn.Parameter(torch.zeros(2, dtype=torch.float16)))
