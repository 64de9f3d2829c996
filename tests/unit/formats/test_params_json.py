"""params.json: sizes as the reference implementations compute them, and values of a wrong kind refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensorferry.errors import CorruptFile
from tensorferry.formats.params_json import Params, Widths, read_params
from tensorferry.storage.local import LocalStorage


def params(**data: Any) -> Params:
    return Params("params.json", data)


def read(folder: Path, text: str) -> Params | None:
    (folder / "params.json").write_text(text)
    with LocalStorage(folder) as storage:
        return read_params(storage)


@pytest.mark.parametrize(
    ("dim", "multiple_of", "multiplier", "width"),
    [
        (4096, 256, None, 11008),  # Llama 7B
        (5120, 256, None, 13824),  # 13B
        (8192, 256, None, 22016),  # 65B
        (8192, 4096, 1.3, 28672),  # Llama 2 and 3, 70B
        (4096, 1024, 1.3, 14336),  # Llama 3, 8B
        (16384, 4096, 1.2, 53248),  # 405B
        (2048, 256, 1.5, 8192),  # Llama 3.2, 1B
        (3072, 256, 1.0, 8192),  # 3B
    ],
)
def test_the_width_of_the_inner_layer_is_that_of_metas_models(
    dim: int, multiple_of: int, multiplier: float | None, width: int
) -> None:
    assert params(dim=dim, multiple_of=multiple_of, ffn_dim_multiplier=multiplier).hidden_dim() == width


def test_a_width_that_is_said_is_taken() -> None:
    assert params(dim=4096, hidden_dim=14336, multiple_of=256).hidden_dim() == 14336
    assert params(dim=4096).hidden_dim() is None


def test_widths_follow_from_heads() -> None:
    assert params(dim=64, n_heads=4, n_kv_heads=2).widths() == Widths(64, 64, 32, None)
    assert params(dim=64, n_heads=4, head_dim=32, hidden_dim=96).widths() == Widths(64, 128, 128, 96)
    assert params().widths() == Widths()


def test_a_folder_without_the_file_has_none(tmp_path: Path) -> None:
    with LocalStorage(tmp_path) as storage:
        assert read_params(storage) is None


def test_text_of_digits_is_a_number() -> None:
    assert params(sliding_window="4096").size("sliding_window") == 4096


def test_null_is_as_good_as_nothing() -> None:
    found = params(head_dim=None, moe=None)
    assert "head_dim" not in found
    assert (found.size("head_dim"), found.part("moe"), found.flag("moe"), found.number("moe")) == (None,) * 4


def test_the_spelling_of_the_first_mixtral_is_known(tmp_path: Path) -> None:
    found = read(tmp_path, '{"hidden_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}')
    assert found is not None
    assert found.size("dim") == 32
    moe = found.part("moe")
    assert moe is not None
    assert (moe.size("num_experts"), moe.size("num_experts_per_tok")) == (8, 2)


def test_sizes_may_lie_in_an_inner_object(tmp_path: Path) -> None:
    found = read(tmp_path, '{"model": {"dim": 32}}')
    assert found is not None
    assert found.size("dim") == 32


@pytest.mark.parametrize("value", [True, 1.5, "4k", [], {}, 0, -8, 2**31])
def test_a_size_is_a_positive_whole_number(value: object) -> None:
    with pytest.raises(CorruptFile, match=r"params\.json: dim: a .*number.* is expected, found"):
        params(dim=value).size("dim")


@pytest.mark.parametrize(("getter", "value"), [("number", "1"), ("number", True), ("flag", 1), ("part", [])])
def test_values_of_another_kind_are_refused(getter: str, value: object) -> None:
    with pytest.raises(CorruptFile, match=r"params\.json: x: .* is expected, found"):
        getattr(params(x=value), getter)("x")


def test_a_message_says_in_which_object_a_value_lies() -> None:
    moe = params(moe={"num_experts": "many"}).part("moe")
    assert moe is not None
    with pytest.raises(CorruptFile, match=r"params\.json: moe: num_experts: a whole number is expected, found 'many'"):
        moe.size("num_experts")


def test_a_multiplier_is_positive() -> None:
    with pytest.raises(CorruptFile, match="ffn_dim_multiplier: a positive number"):
        params(dim=64, multiple_of=8, ffn_dim_multiplier=-1).hidden_dim()
