"""Parts of model-parallel training become one catalogue of whole tensors, or are refused with what does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import ar
from tensorferry.core.boxes import Box
from tensorferry.errors import CorruptFile, FormatError, LocateError
from tensorferry.execute.simple import read_entry
from tensorferry.formats.opening import Opened, open_files

WQ, WK, WO, NORM, WORDS = (
    "layers.0.attention.wq.weight", "layers.0.attention.wk.weight", "layers.0.attention.wo.weight",
    "layers.0.attention_norm.weight", "tok_embeddings.weight",
)  # fmt: skip
SIZES = {"dim": 4, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2}


def part(n: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return part `n` of two: rows of wq, columns of wo, a copy of the norm; `more` by name, dots as __."""
    tensors = {WQ: ar(2, 4, start=100 * n), WO: ar(4, 2, start=100 * n), NORM: ar(4)}
    return {**tensors, **{name.replace("__", "."): tensor for name, tensor in more.items()}}


def write(folder: Path, *parts: Mapping[str, Any], params: Mapping[str, Any] | None = SIZES) -> Path:
    for n, tensors in enumerate(parts):
        torch.save(dict(tensors), folder / f"consolidated.{n:02}.pth")
    if params is not None:
        (folder / "params.json").write_text(json.dumps(params))
    return folder


def opened(folder: Path, *parts: Mapping[str, Any], params: Mapping[str, Any] | None = SIZES) -> Opened:
    return open_files(write(folder, *parts, params=params))


def values(one: Opened, name: str) -> Any:
    return read_entry(one.storage, one.catalogue[name]).tolist()


def test_each_tensor_is_one_entry_of_chunks_in_all_files(tmp_path: Path) -> None:
    with opened(tmp_path, part(0), part(1)) as one:
        wq, wo, norm = (one.catalogue[name] for name in (WQ, WO, NORM))
        assert one.selection.layout == "model-parallel"
        assert [chunk.box for chunk in wq.chunks] == [Box((0, 0), (2, 4)), Box((2, 0), (4, 4))]
        assert [chunk.box for chunk in wo.chunks] == [Box((0, 0), (4, 2)), Box((0, 2), (4, 4))]
        assert wq.files == wo.files == ("consolidated.00.pth", "consolidated.01.pth")
        assert (wq.shape, wo.shape, norm.shape) == ((4, 4), (4, 4), (4,))
        assert norm.files == ("consolidated.00.pth",)


def test_values_come_out_side_by_side(tmp_path: Path) -> None:
    with opened(tmp_path, part(0), part(1)) as one:
        assert values(one, WQ) == [[0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103], [104, 105, 106, 107]]
        assert values(one, WO) == [[0, 1, 100, 101], [2, 3, 102, 103], [4, 5, 104, 105], [6, 7, 106, 107]]
        assert values(one, NORM) == [0, 1, 2, 3]


def test_views_keep_their_strides(tmp_path: Path) -> None:
    parts = [{**part(n), WO: ar(2, 4, start=100 * n).T} for n in range(2)]
    with opened(tmp_path, *parts) as one:
        assert values(one, WO)[0] == [0, 4, 100, 104]


@pytest.mark.parametrize(("shape", "whole"), [((3, 4), (6, 4)), ((6, 2), (6, 4))])
def test_shapes_tell_how_embeddings_are_cut(tmp_path: Path, shape: tuple[int, int], whole: tuple[int, int]) -> None:
    with opened(tmp_path, *(part(n, tok_embeddings__weight=ar(*shape)) for n in range(2))) as one:
        assert one.catalogue[WORDS].shape == whole


def test_without_params_json_the_queries_tell_the_width(tmp_path: Path) -> None:
    parts = [part(n, tok_embeddings__weight=ar(6, 2)) for n in range(2)]
    with opened(tmp_path, *parts, params=None) as one:
        assert one.catalogue[WORDS].shape == (6, 4)
    write(tmp_path, *parts, {**parts[0]}, params=None)
    with pytest.raises(
        CorruptFile, match=r"3 parts of 2 rows, and it should be 4: 2 parts .* expected, and there are 3"
    ):
        open_files(tmp_path)


def test_parts_that_share_heads_of_keys_give_each_once(tmp_path: Path) -> None:
    keys = [ar(2, 4, start=100 * (n // 2)) for n in range(4)]
    parts = [{**part(n), WQ: ar(2, 8)[:, :4].clone(), WO: ar(4, 2), WK: keys[n]} for n in range(4)]
    sizes = {"dim": 4, "n_heads": 4, "head_dim": 2, "n_kv_heads": 2}
    with opened(tmp_path, *parts, params=sizes) as one:
        assert one.catalogue[WK].files == ("consolidated.00.pth", "consolidated.02.pth")
        assert values(one, WK)[1:3] == [[4, 5, 6, 7], [100, 101, 102, 103]]
        assert one.warnings == ("4 parts hold every head of keys and values 2 times: one is used",)


def test_parts_that_should_share_heads_and_do_not_are_refused(tmp_path: Path) -> None:
    parts = [{**part(n), WQ: ar(2, 4), WK: ar(2, 4, start=100 * (n % 2))} for n in range(4)]
    write(tmp_path, *parts, params={"dim": 4, "n_heads": 4, "head_dim": 2, "n_kv_heads": 2})
    with pytest.raises(CorruptFile, match=r"wk\.weight: consolidated\.00\.pth and consolidated\.01\.pth should hold"):
        open_files(tmp_path)


def test_one_part_of_another_size_is_not_believed(tmp_path: Path) -> None:
    message = r"wq\.weight: 2 rows, and params\.json makes it 4: 2 parts of that size are expected, and there is 1"
    write(tmp_path, part(0))
    with pytest.raises(CorruptFile, match=message):
        open_files(tmp_path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write(tmp_path, part(0), part(1), part(2))
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(LocateError, match=r"parts consolidated\.01\.pth is missing"):
        open_files(tmp_path)


def test_a_tensor_that_one_part_lacks_is_named_with_the_part(tmp_path: Path) -> None:
    write(tmp_path, part(0, norm__weight=ar(4)), part(1))
    with pytest.raises(
        CorruptFile, match=r"consolidated\.01\.pth: no tensor 'norm\.weight', of which consolidated\.00"
    ):
        open_files(tmp_path)
    write(tmp_path, part(0), part(1, norm__weight=ar(4)))
    with pytest.raises(
        CorruptFile, match=r"consolidated\.00\.pth: no tensor 'norm\.weight', of which consolidated\.01"
    ):
        open_files(tmp_path)


def test_parts_of_different_shapes_or_types_are_refused(tmp_path: Path) -> None:
    write(tmp_path, part(0), {**part(1), WO: ar(4, 3)})
    with pytest.raises(
        CorruptFile, match=r"wo\.weight: F32 \[4, 2\] in consolidated\.00\.pth and F32 \[4, 3\] in cons"
    ):
        open_files(tmp_path)
    write(tmp_path, part(0), {**part(1), WO: ar(4, 2, dtype=torch.bfloat16)})
    with pytest.raises(CorruptFile, match=r"F32 \[4, 2\] in consolidated\.00\.pth and BF16 \[4, 2\]"):
        open_files(tmp_path)


def test_copies_that_differ_are_refused(tmp_path: Path) -> None:
    write(tmp_path, part(0), {**part(1), NORM: ar(4, start=1)})
    with pytest.raises(CorruptFile, match=r"attention_norm\.weight: consolidated\.00\.pth and consolidated\.01\.pth"):
        open_files(tmp_path)


def test_a_width_that_is_not_that_of_params_json_is_refused(tmp_path: Path) -> None:
    write(tmp_path, *({**part(n), WO: ar(5, 2)} for n in range(2)))
    with pytest.raises(CorruptFile, match=r"wo\.weight: 5 rows, and params\.json makes it 4: the files are of another"):
        open_files(tmp_path)


def test_a_tensor_of_no_known_cut_is_refused(tmp_path: Path) -> None:
    write(tmp_path, *(part(n, vision_model__weight=ar(2)) for n in range(2)))
    with pytest.raises(FormatError, match=r"vision_model\.weight: how this tensor is cut into 2 parts is not known"):
        open_files(tmp_path)


def test_a_vector_where_a_matrix_should_be_is_refused(tmp_path: Path) -> None:
    write(tmp_path, *({**part(n), WO: ar(4)} for n in range(2)))
    with pytest.raises(CorruptFile, match=r"wo\.weight: a matrix is expected, found \[4\]"):
        open_files(tmp_path)


def test_files_with_disjoint_or_foreign_names_are_merged_as_ordinary_ones(tmp_path: Path) -> None:
    with opened(tmp_path, {WQ: ar(4, 4)}, {"norm.weight": ar(4)}) as one:
        assert sorted(one.catalogue) == [WQ, "norm.weight"]
    with opened(tmp_path, {"a": ar(2)}, {"b": ar(2)}) as one:
        assert sorted(one.catalogue) == ["a", "b"]


def test_a_named_part_is_opened_by_itself(tmp_path: Path) -> None:
    write(tmp_path, part(0), part(1))
    with open_files(tmp_path / "consolidated.01.pth") as one:
        assert one.catalogue[WQ].shape == (2, 4)


def test_patterns_that_name_the_parts_join_them(tmp_path: Path) -> None:
    write(tmp_path, part(0), part(1))
    with open_files(tmp_path, allow_patterns=["consolidated.*"]) as one:
        assert one.catalogue[WQ].shape == (4, 4)


def test_parts_in_a_sub_folder_are_joined(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    write(tmp_path / "original", part(0), part(1))
    with open_files(tmp_path, subfolder="original") as one:
        assert one.catalogue[WQ].shape == (4, 4)
