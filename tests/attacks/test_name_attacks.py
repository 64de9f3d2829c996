"""Names out of files that ask for too much: endless digits, numbers, wrappers, and a great many of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import nn

from helpers.checkpoints import ar, write_index, write_safetensors
from tensorferry import Strictness, load
from tensorferry.core.names import fold, natural_key
from tensorferry.errors import LocateError
from tensorferry.formats.opening import open_files

ODD = {
    "thousands of numbers": "0." * 3000 + "w",
    "a number of thousands of digits": "l." + "9" * 5000 + ".w",
    "a hundred thousand wrappers": "module." * 100_000 + "w",
    "nothing but dots": "." * 900_000,
    "empty": "",
}


def with_empty_tensors(path: Path, names: Iterable[str]) -> Path:
    """Write a checkpoint of tensors without elements."""
    header = json.dumps({name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path.parent


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
def test_an_odd_name_is_loaded_past_and_reported(name: str, tmp_path: Path) -> None:
    report = load(nn.Module(), with_empty_tensors(tmp_path / "model.safetensors", [name]))
    assert report.unexpected == (name,)
    assert max(map(len, str(report).splitlines())) <= 1000


def test_many_unexpected_names_cost_no_more_than_their_number(tmp_path: Path) -> None:
    names = [f"x{n}.w" for n in range(50_000)]
    model = nn.Linear(1, 1, bias=False)
    report = load(model, with_empty_tensors(tmp_path / "model.safetensors", names), strict=Strictness(missing="warn"))
    assert len(report.unexpected) == 50_000
    assert report.missing == ("weight",)


def test_names_of_more_numbers_than_any_model_has_are_not_folded() -> None:
    numbers = ".".join("1" * 17)
    assert [f.text for f in fold([f"{numbers}.{n}" for n in range(2)])] == [f"{numbers}.0", f"{numbers}.1"]
    assert [f.text for f in fold([f"{numbers[:29]}.{n}" for n in range(2)])] == [f"{numbers[:29]}.{{0,1}}"]


def test_file_names_sort_by_number_whatever_its_length() -> None:
    names = ["s-10", "s-9", "s-" + "1" * 5000, "s-007"]
    assert sorted(names, key=natural_key) == ["s-007", "s-9", "s-10", "s-" + "1" * 5000]


def test_a_shard_name_of_thousands_of_digits_is_a_file_that_is_not_there(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"w": ar(2)})
    write_index(tmp_path / "model.safetensors.index.json", {"w": "1" * 5000 + ".safetensors"})
    with pytest.raises(LocateError, match="none of them is there"):
        open_files(tmp_path)
