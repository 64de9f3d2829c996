"""Which NumPy caches are believed, and what their tensors are: ours by their record, others' by comparison."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.checkpoints import ar, write_safetensors
from helpers.npy_bytes import write_vllm_cache
from tensorferry import CorruptFile, LocateError, UnknownFormat, open_checkpoint
from tensorferry.formats.npcache_record import file_name_of
from tensorferry.loaders import build_npcache

WEIGHTS = {"a.weight": ar(2, 3), "b": ar(4, start=10, dtype=torch.int64), "scalar": torch.tensor(7.0)}
ARRAYS = {name: tensor.numpy() for name, tensor in WEIGHTS.items()}
HOUR_NS = 3_600_000_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a torch checkpoint that is an hour old."""
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    age(tmp_path / "pytorch_model.bin", HOUR_NS)
    return tmp_path


def age(path: Path, ns: int) -> None:
    then = path.stat().st_mtime_ns - ns
    os.utime(path, ns=(then, then))


def values(folder: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(folder, load_format="npcache") as checkpoint:
        return dict(checkpoint.tensors())


def refused(folder: Path, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        open_checkpoint(folder, load_format="npcache")


def edit_record(folder: Path, **changes: Any) -> None:
    path = folder / "np" / "tensorferry.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_cache_has_the_names_values_and_order_of_the_checkpoint(model: Path) -> None:
    assert build_npcache(model) == model / "np"
    found = values(model)
    assert list(found) == list(WEIGHTS)
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_its_files_are_spans_like_any_other(model: Path) -> None:
    build_npcache(model)
    with open_checkpoint(model, load_format="npcache") as checkpoint:
        assert (checkpoint.catalogue.format, checkpoint.warnings) == ("npcache", ())
        span = checkpoint.catalogue["a.weight"].span
        assert checkpoint.selection.index_file == "np/weight_names.json"
    assert span == ("np/a.weight", 128, 24)


def test_without_being_asked_nobody_looks_at_it(model: Path) -> None:
    build_npcache(model)
    for load_format in ("auto", "hf", "pt"):
        with open_checkpoint(model, load_format=load_format) as checkpoint:
            assert checkpoint.catalogue.files == ("pytorch_model.bin",)


def test_where_there_is_none_the_message_says_what_builds_one(model: Path) -> None:
    refused(model, LocateError, r"no finished NumPy cache of pytorch_model\.bin; get_model_loader\(LoadConfig\(")


def test_a_folder_of_safetensors_would_gain_nothing_by_one(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", WEIGHTS)
    refused(tmp_path, LocateError, r"HF safetensors: 1 file.*A NumPy cache is for torch files.*would gain nothing")


@pytest.mark.parametrize("change", ["touched", "longer", "renamed", "more"])
def test_it_is_stale_when_what_it_was_made_of_is_another(model: Path, change: str) -> None:
    build_npcache(model)
    file = model / "pytorch_model.bin"
    words = {
        "touched": r"pytorch_model\.bin was written to",
        "longer": r"pytorch_model\.bin had \d+ bytes when it was made, and has",
        "renamed": r"model\.bin is new",
        "more": r"pytorch_model-00001-of-00002\.bin is new",
    }[change]
    if change == "touched":
        os.utime(file)
    elif change == "longer":
        torch.save({**WEIGHTS, "more": ar(3)}, file)
    elif change == "renamed":
        file.rename(model / "model.bin")
    else:
        torch.save({"other": ar(2)}, model / "pytorch_model-00002-of-00002.bin")
        file.rename(model / "pytorch_model-00001-of-00002.bin")
    refused(model, LocateError, f"stale: {words}")


def test_a_shard_index_is_one_of_the_files_that_it_is_made_of(model: Path) -> None:
    index = model / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "pytorch_model.bin")}))
    build_npcache(model)
    assert list(values(model)) == list(WEIGHTS)
    os.utime(index)
    refused(model, LocateError, r"stale: pytorch_model\.bin\.index\.json was written to")


def test_a_moved_folder_keeps_it_where_times_are_kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    build_npcache(model)
    moved = model.rename(tmp_path_factory.mktemp("other") / "model")
    assert list(values(moved)) == list(WEIGHTS)


def test_files_that_went_cannot_be_compared_which_is_told(model: Path) -> None:
    build_npcache(model)
    (model / "pytorch_model.bin").unlink()
    with open_checkpoint(model, load_format="npcache") as checkpoint:
        (warning,) = checkpoint.warnings
        assert warning == "pytorch_model.bin, of which np/ was made, cannot be compared: not there"
        assert list(checkpoint.catalogue) == list(WEIGHTS)


def test_one_that_vllm_made_is_taken_if_it_is_younger_and_alike(model: Path) -> None:
    write_vllm_cache(model, ARRAYS)
    found = values(model)
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    with open_checkpoint(model, load_format="npcache") as checkpoint:
        assert "younger than pytorch_model.bin, with equal names, types and shapes" in checkpoint.warnings[0]


def test_one_that_vllm_made_before_the_files_changed_is_stale(model: Path) -> None:
    write_vllm_cache(model, ARRAYS, age_s=7200)
    refused(model, LocateError, r"stale: pytorch_model\.bin is younger")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({**ARRAYS, "more": np.zeros(2)}, r"'more' is absent there and F64 \[2\] in the cache"),
        ({"a.weight": ARRAYS["a.weight"]}, r"'b' is I64 \[4\] there and absent"),
        ({**ARRAYS, "b": np.zeros(4, np.int32)}, r"'b' is I64 \[4\] there and I32 \[4\]"),
        ({**ARRAYS, "a.weight": np.zeros((3, 2), np.float32)}, r"'a.weight' is F32 \[2, 3\] there and F32 \[3, 2\]"),
    ],
)
def test_one_that_vllm_made_of_something_else_is_stale(model: Path, arrays: dict[str, Any], words: str) -> None:
    write_vllm_cache(model, arrays)
    refused(model, LocateError, words)


def test_one_that_vllm_made_is_read_by_itself_with_a_warning(tmp_path: Path) -> None:
    write_vllm_cache(tmp_path, ARRAYS)
    assert values(tmp_path)["b"].tolist() == [10, 11, 12, 13]
    with open_checkpoint(tmp_path, load_format="npcache") as checkpoint:
        assert "there is nothing to compare it with" in checkpoint.warnings[0]


def test_one_that_vllm_did_not_finish_is_none(model: Path) -> None:
    (write_vllm_cache(model, ARRAYS) / "weight_names.json").unlink()
    refused(model, LocateError, "no finished NumPy cache")


@pytest.mark.parametrize("file", ["a.weight", "weight_names.json", "tensorferry.json"])
@pytest.mark.parametrize("size", [0, 1, 60])
def test_one_with_a_file_that_was_cut_is_refused(model: Path, file: str, size: int) -> None:
    build_npcache(model)
    os.truncate(model / "np" / file, size)
    with pytest.raises((CorruptFile, UnknownFormat), match=file):
        open_checkpoint(model, load_format="npcache")


def test_one_that_lacks_a_file_is_refused(model: Path) -> None:
    (build_npcache(model) / "b").unlink()
    refused(model, LocateError, "np/b")


def test_lists_that_disagree_are_refused(model: Path) -> None:
    (build_npcache(model) / "weight_names.json").write_text('["b", "a.weight", "scalar"]')
    refused(model, CorruptFile, r"np/weight_names\.json and np/tensorferry\.json are of two caches")


@pytest.mark.parametrize("array", [np.zeros((2, 3), np.int32), np.zeros((3, 2), np.float32), np.zeros((2, 3), "V4")])
def test_an_array_that_is_not_what_the_record_says_is_refused(model: Path, array: np.ndarray[Any, Any]) -> None:
    with (build_npcache(model) / "a.weight").open("wb") as out:
        np.save(out, array)
    refused(model, CorruptFile, r"np/a\.weight.*where np/tensorferry\.json says F32 of shape \[2, 3\]")


def test_a_record_of_another_version_is_not_understood(model: Path) -> None:
    build_npcache(model)
    edit_record(model, version=2)
    refused(model, UnknownFormat, "version 2 of the record; version 1 is known here")


def test_a_file_may_be_opened_through_its_cache_too(model: Path) -> None:
    build_npcache(model / "pytorch_model.bin")
    assert list(values(model / "pytorch_model.bin")) == list(WEIGHTS)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("naïve weight\n", "naïve weight\n"),
        ("", "%"),
        (".", "%2E"),
        ("..", "%2E."),
        (".hidden", "%2Ehidden"),
        ("../a", "%2E.%2Fa"),
        ("/etc/passwd", "%2Fetc%2Fpasswd"),
        ("a\\b", "a%5Cb"),
        ("a\0b", "a%00b"),
        ("s3:b", "s3%3Ab"),
        ("100%", "100%25"),
        ("a%2Fb", "a%252Fb"),
        ("weight_names.json", "%77eight_names.json"),
        ("tensorferry.json", "%74ensorferry.json"),
    ],
)
def test_a_file_is_called_like_its_tensor_or_escaped(name: str, file: str) -> None:
    assert file_name_of(name) == file


@pytest.mark.parametrize("letter", ["w", "é", "/"])
def test_a_name_that_is_too_long_is_cut_and_kept_apart_from_others(letter: str) -> None:
    names = [letter * 300, letter * 301]
    files = [file_name_of(name) for name in names]
    assert len(set(files)) == 2
    assert all(len(file.encode()) <= 200 for file in files)
