"""A shard index is believed only where it is well-formed and stays in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensorferry.errors import CorruptFile, UnsafeFile
from tensorferry.formats.index import MAX_INDEX_BYTES, check_index_size, parse_index, read_index
from tensorferry.storage.base import File
from tensorferry.storage.local import LocalStorage

NAME = "model.safetensors.index.json"


def parse(content: object) -> dict[str, str]:
    return parse_index(json.dumps(content).encode(), what=NAME)


def test_the_weight_map_comes_back_in_its_order() -> None:
    weight_map = {"b": "model-00002-of-00002.safetensors", "a": "model-00001-of-00002.safetensors"}
    assert list(parse({"weight_map": weight_map}).items()) == list(weight_map.items())


def test_metadata_may_be_there_or_not_and_total_size_is_not_believed() -> None:
    assert parse({"metadata": {"total_size": -3}, "weight_map": {"a": "x.safetensors"}}) == {"a": "x.safetensors"}


def test_one_shard_name_is_one_string_however_many_tensors_it_holds() -> None:
    found = parse({"weight_map": {f"t{i}": "x.safetensors" for i in range(100)}})
    assert len({id(shard) for shard in found.values()}) == 1


def test_a_nested_shard_is_fine() -> None:
    assert parse({"weight_map": {"a": "shards/x.safetensors"}}) == {"a": "shards/x.safetensors"}


@pytest.mark.parametrize(
    "data", [b'{"weight_map": {"a":', b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": null}']
)
def test_an_index_without_a_map_is_corrupt_and_named(data: bytes) -> None:
    with pytest.raises(CorruptFile, match=NAME):
        parse_index(data, what=NAME)


@pytest.mark.parametrize("value", [["a"], "model.safetensors", 3])
def test_a_map_that_is_no_object_is_corrupt(value: object) -> None:
    with pytest.raises(CorruptFile, match="weight_map must be a JSON object"):
        parse({"weight_map": value})


@pytest.mark.parametrize(("value", "found"), [(None, "null"), (3, "a number"), (["x"], "an array"), ("", "''")])
def test_a_shard_that_is_no_name_is_corrupt_and_its_tensor_is_named(value: object, found: str) -> None:
    with pytest.raises(CorruptFile, match=f"'layer.w': a file name is expected, found {found}"):
        parse({"weight_map": {"layer.w": value}})


@pytest.mark.parametrize(
    ("shard", "why"),
    [
        ("../x.safetensors", "leads out of the folder"),
        ("a/../../x.safetensors", "leads out of the folder"),
        ("/etc/x.safetensors", "is an absolute path"),
        ("a\\x.safetensors", "holds a backslash"),
        ("x\0.safetensors", "holds a NUL byte"),
        ("https://example.org/x.safetensors", "is a URL or a drive"),
        ("C:x.safetensors", "is a URL or a drive"),
        ("./x.safetensors", "is not in its normal form"),
        ("a//x.safetensors", "is not in its normal form"),
        (".hidden.safetensors", "is a dot file"),
        (".cache/x.safetensors", "is a dot file"),
    ],
)
def test_a_name_that_is_no_plain_path_below_the_folder_is_unsafe(shard: str, why: str) -> None:
    with pytest.raises(UnsafeFile, match=f"{NAME}.*{why}"):
        parse({"weight_map": {"good": "x.safetensors", "bad": shard}})


def test_control_characters_of_an_index_do_not_reach_the_message() -> None:
    with pytest.raises(UnsafeFile) as caught:
        parse({"weight_map": {"w": "../\x1b[31mred"}})
    assert "\x1b" not in str(caught.value)


def test_duplicate_tensor_names_are_corrupt() -> None:
    with pytest.raises(CorruptFile, match="duplicate key"):
        parse_index(b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', what=NAME)


def test_an_oversized_index_is_refused_unread() -> None:
    with pytest.raises(CorruptFile, match="has at most"):
        check_index_size(File(NAME, MAX_INDEX_BYTES + 1, ()))


def test_an_empty_index_file_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    with LocalStorage(tmp_path) as storage, pytest.raises(CorruptFile, match="0 bytes"):
        read_index(storage, storage.stat(NAME))


def test_an_index_is_read_from_its_storage(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"weight_map": {"a": "x.safetensors"}}')
    with LocalStorage(tmp_path) as storage:
        assert read_index(storage, storage.stat(NAME)) == {"a": "x.safetensors"}
