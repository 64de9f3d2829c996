"""Hostile shard indexes and file names: each is refused by name, cheaply, and has an accepted neighbour."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from helpers.checkpoints import ar, write_index, write_safetensors
from helpers.measuring import little_memory
from helpers.reading import read_all, watching_opens
from tensorferry.errors import CorruptFile, FormatError, LocateError, TensorferryError, UnsafeFile
from tensorferry.formats.index import MAX_INDEX_BYTES
from tensorferry.formats.opening import open_files

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
GOOD = f'{{"weight_map": {{"w": "{SHARD}"}}}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with one shard, beside a file that nobody may open."""
    write_safetensors(tmp_path / "secret.safetensors", {"w": ar(2, start=666)})
    write_safetensors(tmp_path / "m" / SHARD, {"w": ar(2)})
    return tmp_path / "m"


def refusal(folder: Path) -> TensorferryError:
    """Return the error of opening `folder`; it must open nothing outside, name a file and cost little."""
    with little_memory(), watching_opens() as opened, pytest.raises(TensorferryError) as caught:
        open_files(folder)
    assert not [path for path in opened if path.endswith("secret.safetensors")]
    assert "\x1b" not in str(caught.value)
    return caught.value


def test_the_neighbour_of_all_these_is_accepted(folder: Path) -> None:
    (folder / INDEX).write_text(GOOD)
    assert read_all(folder) == {"w": [0, 1]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        GOOD[:-1],
        GOOD + "x",
        GOOD + GOOD,
        "\ufeff" + GOOD,
        GOOD.replace("}}", ", }}"),
        GOOD.replace("}}", "}} // comment"),
        GOOD.replace('{"weight_map"', '{"x": NaN, "weight_map"'),
        GOOD.replace('{"weight_map"', '{"weight_map": {}, "weight_map"'),
        GOOD.replace('"w":', '"w": "other.safetensors", "\\u0077":'),
        GOOD.replace('"w"', '"\\ud800"'),
        GOOD.replace('"w"', '"w\n"'),
        '{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"x": ' + "9" * 100_000 + "}",
    ],
    ids=lambda text: text[:24] or "empty",
)
def test_what_is_no_strict_json_is_corrupt(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text, encoding="utf-8")
    error = refusal(folder)
    assert isinstance(error, CorruptFile)
    assert INDEX in str(error)


def test_an_index_that_is_no_utf_8_is_corrupt(folder: Path) -> None:
    (folder / INDEX).write_bytes(GOOD.encode("utf-16"))
    assert isinstance(refusal(folder), CorruptFile)


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "./../secret.safetensors",
        "a/../../secret.safetensors",
        "..",
        "/",
        ".",
        "/proc/self/mem",
        "..\\secret.safetensors",
        f"{SHARD}\0.txt",
        "file:///etc/passwd",
        "https://example.org/x.safetensors",
        f"./{SHARD}",
        f"a//{SHARD}",
        f"{SHARD}/",
        ".hidden.safetensors",
        "../\x1b[31m",
    ],
)
def test_a_shard_name_that_is_no_plain_path_is_unsafe(folder: Path, shard: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": SHARD, "v": shard}}))
    error = refusal(folder)
    assert isinstance(error, UnsafeFile)
    assert INDEX in str(error)


@pytest.mark.parametrize("shard", [None, 0, True, 1.5, [], {}, ["x"], ""])
def test_a_shard_that_is_no_text_is_corrupt(folder: Path, shard: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": shard}}))
    assert isinstance(refusal(folder), CorruptFile)


def test_a_link_that_leads_out_is_unsafe_and_one_that_stays_is_followed(folder: Path) -> None:
    (folder / "out.safetensors").symlink_to("../secret.safetensors")
    write_index(folder / INDEX, {"w": "out.safetensors"})
    assert isinstance(refusal(folder), UnsafeFile)
    (folder / "in.safetensors").symlink_to(SHARD)
    write_index(folder / INDEX, {"w": "in.safetensors"})
    assert read_all(folder) == {"w": [0, 1]}


def test_a_nested_link_that_leads_out_is_unsafe(folder: Path) -> None:
    (folder / "sub").symlink_to("..")
    write_index(folder / INDEX, {"w": "sub/secret.safetensors"})
    assert isinstance(refusal(folder), UnsafeFile)


def test_an_index_that_is_a_link_out_is_unsafe(folder: Path) -> None:
    (folder.parent / "index.json").write_text(GOOD)
    (folder / INDEX).symlink_to("../index.json")
    assert isinstance(refusal(folder), UnsafeFile)


def test_a_sub_folder_that_a_link_leads_out_of_the_folder_is_unsafe(folder: Path) -> None:
    write_safetensors(folder.parent / "other" / "model.safetensors", {"w": ar(2)})
    (folder / "sub").symlink_to("../other")
    with pytest.raises(UnsafeFile, match="leads out of its folder"):
        open_files(folder, subfolder="sub")
    write_safetensors(folder / "real" / "model.safetensors", {"w": ar(2, start=5)})
    (folder / "linked").symlink_to("real")
    assert read_all(folder, subfolder="linked") == {"w": [5, 6]}


def test_links_in_a_circle_are_no_file(folder: Path) -> None:
    (folder / "a.safetensors").symlink_to("b.safetensors")
    (folder / "b.safetensors").symlink_to("a.safetensors")
    write_index(folder / INDEX, {"w": "a.safetensors"})
    assert isinstance(refusal(folder), LocateError)


def test_a_pipe_among_the_shards_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "pipe.safetensors")
    write_index(folder / INDEX, {"w": "pipe.safetensors"})
    assert isinstance(refusal(folder), UnsafeFile)


def test_a_pipe_without_an_index_does_not_block(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / "model.safetensors")
    assert isinstance(refusal(folder), UnsafeFile)


def test_a_pipe_as_the_index_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / INDEX)
    assert isinstance(refusal(folder), UnsafeFile)


def test_a_socket_is_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("s.safetensors")
        write_index(folder / INDEX, {"w": "s.safetensors"})
        assert isinstance(refusal(folder), UnsafeFile)


def test_a_folder_as_a_shard_is_no_file(folder: Path) -> None:
    (folder / "d.safetensors").mkdir()
    write_index(folder / INDEX, {"w": "d.safetensors"})
    assert isinstance(refusal(folder), LocateError)


def test_an_index_of_absurd_size_is_not_read(folder: Path) -> None:
    with (folder / INDEX).open("wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    assert "a shard index has at most" in str(refusal(folder))


def test_an_index_full_of_zeros_is_refused(folder: Path) -> None:
    (folder / INDEX).write_bytes(bytes(4 << 20))
    assert isinstance(refusal(folder), CorruptFile)


@pytest.mark.parametrize(
    ("begin", "one", "count"),
    [
        ('{"x": "', "a", 30_000_000),
        ('{"x": "\U0001f600', "a", 30_000_000),
        ('{"x": [', "{},", 10_000_000),
        ('{"x": {', '"a": {"b": 1},', 2_000_000),
    ],
    ids=["text", "wide text", "list", "pairs"],
)
def test_an_index_with_something_huge_beside_its_map_is_refused_cheaply(
    folder: Path, begin: str, one: str, count: int
) -> None:
    (folder / INDEX).write_text(begin + one * count)
    assert isinstance(refusal(folder), CorruptFile)


def test_an_index_of_more_shards_than_any_checkpoint_has_is_refused_before_they_are_looked_for(folder: Path) -> None:
    write_index(folder / INDEX, {f"t{i}": f"s{i}.safetensors" for i in range(40_000)})
    assert "or 32,768 shards" in str(refusal(folder))


def test_an_index_of_many_absent_shards_names_a_few(folder: Path) -> None:
    write_index(folder / INDEX, {f"t{i}": f"s{i}.safetensors" for i in range(20_000)})
    error = refusal(folder)
    assert "none of them is there" in str(error)
    assert len(str(error)) < 2000


def test_a_count_in_a_name_allocates_nothing(folder: Path) -> None:
    (folder / SHARD).rename(folder / "m-1-of-999999999.safetensors")
    assert isinstance(refusal(folder), LocateError)


def test_a_number_of_thousands_of_digits_is_no_number(folder: Path) -> None:
    (folder / SHARD).rename(folder / f"m-1-of-{'9' * 200}.safetensors")
    assert read_all(folder) == {"w": [0, 1]}


def test_two_files_of_one_number_are_refused(folder: Path) -> None:
    write_safetensors(folder / "m-1-of-2.safetensors", {"w": ar(2)})
    write_safetensors(folder / "m-01-of-2.safetensors", {"w": ar(2)})
    write_safetensors(folder / "m-2-of-2.safetensors", {"v": ar(2)})
    (folder / SHARD).unlink()
    assert isinstance(refusal(folder), FormatError)


def test_names_of_files_are_escaped_in_messages(folder: Path) -> None:
    (folder / SHARD).unlink()
    (folder / "\x1b[31mx.gguf").touch()
    assert "\\x1b[31mx.gguf" in str(refusal(folder))
