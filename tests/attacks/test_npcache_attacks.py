"""Hostile NumPy caches: names that lead out of the folder, lists and records that bomb, files that are no files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.checkpoints import ar
from helpers.measuring import little_memory, little_time
from helpers.npy_bytes import npy, write_vllm_cache
from tensorferry import CorruptFile, FormatError, LocateError, TensorferryError, UnsafeFile, open_checkpoint
from tensorferry.formats.npcache_record import MAX_TENSORS
from tensorferry.loaders import build_npcache

HOSTILE_NAMES = ["../w", "/etc/passwd", "a/b", "..", ".", ".hidden", "", "a\\b", "a\0b", "file:w", "C:w", "w" * 256]
RESERVED = ["weight_names.json", "tensorferry.json"]


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A folder with a torch checkpoint and its cache."""
    torch.save({"w": ar(2), "v": ar(3)}, tmp_path / "pytorch_model.bin")
    build_npcache(tmp_path)
    return tmp_path


def refused(folder: Path, kind: type[TensorferryError], words: str) -> None:
    with pytest.raises(kind, match=words) as refusal:
        open_checkpoint(folder, load_format="npcache")
    assert len(str(refusal.value)) < 1000


def rewrite(folder: Path, record: object) -> None:
    (folder / "np" / "tensorferry.json").write_text(json.dumps(record))


def record_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "np" / "tensorferry.json").read_text())
    return found


@pytest.mark.parametrize("name", [*HOSTILE_NAMES, *RESERVED])
def test_a_list_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (write_vllm_cache(tmp_path, {}) / "weight_names.json").write_text(json.dumps([name]))
    refused(tmp_path, UnsafeFile, r"np/weight_names\.json .*names the file .*nothing was read from there")


@pytest.mark.parametrize("name", [*HOSTILE_NAMES, *RESERVED])
def test_a_record_that_leads_out_of_the_folder_is_refused(cached: Path, name: str) -> None:
    rewrite(cached, record_of(cached) | {"tensors": {name: {"dtype": "F32", "shape": [2]}}})
    refused(cached, UnsafeFile, r"np/tensorferry\.json .*names the file")


def test_a_tensor_may_have_any_name_for_its_file_is_another(cached: Path) -> None:
    tensors = {"w": {"name": "../../etc/passwd", "dtype": "F32", "shape": [2]}, "v": {"dtype": "F32", "shape": [3]}}
    rewrite(cached, record_of(cached) | {"tensors": tensors})
    with open_checkpoint(cached, load_format="npcache") as checkpoint:
        assert checkpoint.read("../../etc/passwd").tolist() == [0, 1]
        assert checkpoint.catalogue.files == ("np/w", "np/v")


def test_two_files_of_one_tensor_are_refused(cached: Path) -> None:
    tensors = {"w": {"dtype": "F32", "shape": [2]}, "v": {"name": "w", "dtype": "F32", "shape": [3]}}
    rewrite(cached, record_of(cached) | {"tensors": tensors})
    refused(cached, FormatError, "tensor 'w' is there twice, in np/w and np/v")


@pytest.mark.parametrize("place", ["np/w", "np/weight_names.json", "np"])
def test_links_that_lead_out_are_not_followed(
    cached: Path, tmp_path_factory: pytest.TempPathFactory, place: str
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "moved"
    (cached / place).rename(outside)
    (cached / place).symlink_to(outside)
    refused(cached, UnsafeFile, "leads out of its folder")


@pytest.mark.parametrize("file", ["np/w", "np/weight_names.json", "np/tensorferry.json"])
def test_a_pipe_in_place_of_a_file_blocks_nobody(cached: Path, file: str) -> None:
    (cached / file).unlink()
    os.mkfifo(cached / file)
    refused(cached, UnsafeFile, "pipe")


def test_a_folder_in_place_of_a_file_is_refused(cached: Path) -> None:
    (cached / "np" / "w").unlink()
    (cached / "np" / "w").mkdir()
    refused(cached, LocateError, "np/w .*is a folder")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        '"w"',
        "[1]",
        "[null]",
        '["w", ["v"]]',
        '["w"',
        '["w"] ["v"]',
        '["w",]',
        '["w", "w"]',
        '["\\ud800"]',
        '["w\n"]',
        "\ufeff[]",
        "['w']",
        '["w"] // more',
    ],
)
def test_a_list_that_is_no_strict_json_of_names_is_refused(cached: Path, text: str) -> None:
    (cached / "np" / "weight_names.json").write_text(text, encoding="utf-8")
    refused(cached, CorruptFile, r"np/weight_names\.json")


def spoilt(**changes: object) -> Callable[[dict[str, object]], object]:
    return lambda record: record | changes


def held(**changes: object) -> Callable[[dict[str, object]], object]:
    return spoilt(tensors={"w": {"dtype": "F32", "shape": [2]} | changes, "v": {"dtype": "F32", "shape": [3]}})


SPOILT: dict[str, Callable[[dict[str, object]], object]] = {
    "an array": lambda record: [record],
    "nothing": lambda record: {},
    "no format": spoilt(format=None),
    "another format": spoilt(format="npz"),
    "no version": spoilt(version=None),
    "a version that is true": spoilt(version=True),
    "a version that is text": spoilt(version="1"),
    "tensors that are a list": spoilt(tensors=[]),
    "a tensor that is text": spoilt(tensors={"w": "F32", "v": "F32"}),
    "no dtype": held(dtype=None),
    "a dtype that is a number": held(dtype=5),
    "a dtype that nobody knows": held(dtype="F31"),
    "a dtype of another size": held(dtype="BF16"),
    "a dtype of another kind": held(dtype="I32"),
    "no shape": held(shape=None),
    "a shape that is text": held(shape="2"),
    "a negative dimension": held(shape=[-2]),
    "a dimension that is true": held(shape=[True, 2]),
    "a dimension that is a fraction": held(shape=[2.0]),
    "another shape": held(shape=[1, 2]),
    "a name that is a number": held(name=5),
    "a name that is half a pair": held(name="\ud800"),
    "no sources": spoilt(sources=None),
    "a source that is text": spoilt(sources=["pytorch_model.bin"]),
    "a source without a time": spoilt(sources=[{"name": "pytorch_model.bin", "size": 1}]),
    "a source with more": spoilt(sources=[{"name": "a", "size": 1, "mtime_ns": 1, "x": 1}]),
    "a size that is text": spoilt(sources=[{"name": "a", "size": "1", "mtime_ns": 1}]),
    "metadata of numbers": spoilt(metadata={"a": 1}),
    "metadata that is a list": spoilt(metadata=[]),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_record_with_any_fault_is_refused(cached: Path, fault: str) -> None:
    rewrite(cached, SPOILT[fault](record_of(cached)))
    refused(cached, CorruptFile, r"tensorferry\.json")


@pytest.mark.parametrize("key", ["format", "tensors", "sources", "w", "dtype", "name"])
def test_a_record_with_a_key_twice_is_refused(cached: Path, key: str) -> None:
    path = cached / "np" / "tensorferry.json"
    text = path.read_text()
    assert f'"{key}": ' in text
    at = text.index(f'"{key}": ')
    value, end = json.JSONDecoder().raw_decode(text, at + len(key) + 4)
    path.write_text(f"{text[:end]}, {text[at:end]}{text[end:]}")
    refused(cached, CorruptFile, r"np/tensorferry\.json.*duplicate key")
    assert value is not None


BIG = 8_000_000
LISTS = {
    "empty names": b'["",' + b'"",' * (BIG // 3),
    "short names": b"[" + b",".join(b'"%x"' % i for i in range(BIG // 9)),
    "one name": b'["' + b"a" * BIG,
    "a name with wide characters": b'["' + "😀".encode() + b"a" * BIG,
    "escapes": b'["' + b"\\u0041" * (BIG // 6),
    "arrays": b"[" * BIG,
    "objects": b"[" + b"{}," * (BIG // 3),
    "numbers": b"[" + b"1000," * (BIG // 5),
    "spaces": b" " * BIG,
}
RECORDS = {
    "tensors": b'{"tensors":{'
    + b",".join(b'"%06x":{"dtype":"F32","shape":[2,3]}' % i for i in range(MAX_TENSORS + 1))
    + b"}}",
    "one tensor again and again": b'{"tensors":{' + b'"w":{"dtype":"F32","shape":[2]},' * (BIG // 32),
    "dims": b'{"tensors":{"w":{"dtype":"F32","shape":[' + b"1," * (BIG // 2),
    "members": b"{" + b",".join(b'"%x":0' % i for i in range(BIG // 9)),
    "sources": b'{"sources":[' + b"{}," * (BIG // 3),
    "arrays": b'{"sources":' + b"[" * BIG,
    "metadata": b'{"metadata":{"a":"' + b"a" * BIG,
}


@pytest.mark.parametrize("bomb", LISTS)
def test_refusing_a_list_costs_little(cached: Path, bomb: str) -> None:
    (cached / "np" / "weight_names.json").write_bytes(LISTS[bomb])
    with little_memory(), pytest.raises(TensorferryError):
        open_checkpoint(cached, load_format="npcache")


@pytest.mark.parametrize("bomb", LISTS)
def test_refusing_a_list_takes_little_time(cached: Path, bomb: str) -> None:
    (cached / "np" / "weight_names.json").write_bytes(LISTS[bomb])
    with little_time(), pytest.raises(TensorferryError):
        open_checkpoint(cached, load_format="npcache")


@pytest.mark.parametrize("bomb", RECORDS)
def test_refusing_a_record_costs_little(cached: Path, bomb: str) -> None:
    (cached / "np" / "tensorferry.json").write_bytes(RECORDS[bomb])
    with little_memory(), pytest.raises(CorruptFile):
        open_checkpoint(cached, load_format="npcache")


@pytest.mark.parametrize("bomb", RECORDS)
def test_refusing_a_record_takes_little_time(cached: Path, bomb: str) -> None:
    (cached / "np" / "tensorferry.json").write_bytes(RECORDS[bomb])
    with little_time(), pytest.raises(CorruptFile):
        open_checkpoint(cached, load_format="npcache")


@pytest.mark.parametrize("file", ["weight_names.json", "tensorferry.json"])
def test_files_of_many_gigabytes_are_refused_unread(cached: Path, file: str) -> None:
    os.truncate(cached / "np" / file, 1 << 36)
    with little_memory(1 << 20), pytest.raises(CorruptFile, match=f"{file}.*68719476736 bytes, where 1 to"):
        open_checkpoint(cached, load_format="npcache")


def test_an_array_that_declares_terabytes_is_refused_before_memory_is_taken(cached: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }\n"
    (cached / "np" / "w").write_bytes(npy(header, bytes(8)))
    with little_memory(1 << 20), pytest.raises(CorruptFile, match=r"np/w .*truncated"):
        open_checkpoint(cached, load_format="npcache")


def test_an_archive_of_arrays_is_no_array(cached: Path) -> None:
    with (cached / "np" / "w").open("wb") as out:
        np.savez(out, w=np.zeros(2))
    refused(cached, FormatError, "np/w .*zip archive")


def test_names_are_made_safe_before_they_are_told(tmp_path: Path) -> None:
    (write_vllm_cache(tmp_path, {}) / "weight_names.json").write_text(json.dumps(["\x1b[31m/" + "a" * 10_000]))
    with pytest.raises(UnsafeFile) as refusal:
        open_checkpoint(tmp_path, load_format="npcache")
    assert "\x1b" not in str(refusal.value)
    assert len(str(refusal.value)) < 500
