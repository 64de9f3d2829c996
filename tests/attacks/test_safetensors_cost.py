"""What it costs to refuse a safetensors file: little memory, few bytes read, little time of the processor."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.measuring import little_memory, little_time, refused
from helpers.safetensors_bytes import EMPTY, NAME, catalogue, entry, st_file, with_metadata
from tensorferry.errors import CorruptFile
from tensorferry.formats.safetensors import MAX_TENSORS, SafetensorsFormat
from tensorferry.storage.local import LocalStorage

# Headers of 99 MB; behind the first 8 MB the files are holes of the file system.

BIG = 99_000_000


def big(start: bytes, unit: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as out:
            out.write(struct.pack("<Q", BIG) + start + unit * (8_000_000 // len(unit)))
            out.truncate(8 + BIG)

    return write


def declared(length: int) -> Callable[[Path], None]:
    return lambda path: void(path.write_bytes(struct.pack("<Q", length) + b"{}"))


def void(_: object) -> None:
    """Drop a result where a function must have none."""


BOMBS = {
    "a length of 2^63": declared(2**63 + 5),
    "a length of 100 MB in a file of 10 bytes": declared(100_000_000),
    "garbage": big(b"{", b"\xff\xfe"),
    "letters": big(b"{", b"a"),
    "arrays in arrays": big(b'{"a":', b"["),
    "objects in objects": big(b"", b'{"a":'),
    "objects in metadata": big(b'{"__metadata__":', b'{"a":'),
    "one name again and again": big(b"{", b'"a":' + EMPTY.encode() + b","),
    "one key of an entry again and again": big(b'{"a":{', b'"dtype":"U8",'),
    "the shortest members": big(b'{"a":{', b'"":0,'),
    "dims": big(b'{"a":{"dtype":"U8","shape":[', b"1,"),
    "negative zeros": big(b'{"a":{"dtype":"U8","shape":[', b"-0,"),
    "digits": big(b'{"a":{"dtype":"U8","shape":[', b"1"),
    "numbers of 4000 digits": big(b'{"a":{"dtype":"U8","shape":[', b"1" * 4000 + b","),
    "one name": big(b'{"', b"a"),
    "one name with wide characters": big(b'{"\xf0\x9f\x98\x80', b"a"),
    "escapes": big(b'{"', b"\\ud83d"),
    "one value of metadata": big(b'{"__metadata__":{"a":"', b"a"),
    "one value of metadata with wide characters": big(b'{"__metadata__":{"a":"\xf0\x9f\x98\x80', b"\\n"),
    "spaces in an entry": big(b'{"a":', b" "),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_refusing_a_bomb_reads_little_and_takes_little_memory(bomb: str, tmp_path: Path) -> None:
    BOMBS[bomb](tmp_path / NAME)
    with little_memory():
        assert refused(SafetensorsFormat(), tmp_path / NAME) <= 7 << 20


@pytest.mark.parametrize("bomb", BOMBS)
def test_refusing_a_bomb_takes_little_time_of_the_processor(bomb: str, tmp_path: Path) -> None:
    BOMBS[bomb](tmp_path / NAME)
    with little_time():
        refused(SafetensorsFormat(), tmp_path / NAME)


def test_many_short_keys_of_metadata_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    keys = ",".join(f'"{i}":""' for i in range(70_000))
    with pytest.raises(CorruptFile, match="65536 keys"):
        catalogue(tmp_path, with_metadata("{" + keys + "}"))


def test_metadata_counts_by_the_memory_that_it_takes(tmp_path: Path) -> None:
    values = ['"' + "x" * 250 + end for end in ('"', '\U0001f600"')]
    plain, wide = ("{" + ",".join(f'"{i}":{value}' for i in range(60_000)) + "}" for value in values)
    assert len(catalogue(tmp_path, with_metadata(plain)).metadata) == 60_000
    with pytest.raises(CorruptFile, match="__metadata__ takes over"):
        catalogue(tmp_path, with_metadata(wide))


def test_a_fault_behind_50000_tensors_takes_under_64_mib(tmp_path: Path) -> None:
    members = [f'"t{i}":{entry(offsets=f"[{i},{i + 1}]")}' for i in range(50_000)]
    content = st_file("{" + ",".join([*members, f'"z":{entry(offsets="[50001,50002]")}']) + "}", b"\0" * 50_002)
    (tmp_path / NAME).write_bytes(content)
    with little_memory():
        refused(SafetensorsFormat(), tmp_path / NAME, "hole: bytes 50000 to 50001")


def test_a_long_header_full_of_spaces_is_read_to_its_end(tmp_path: Path) -> None:
    assert list(catalogue(tmp_path, st_file('{"t":' + entry() + "}" + " " * 3_000_000, b"\1"))) == ["t"]
    with pytest.raises(CorruptFile, match="found 'x', at character 3000002"):
        catalogue(tmp_path, st_file("{}" + " " * 3_000_000 + "x"))


def sound(count: int) -> str:
    """Return `count` sound tensors of one byte each, as they stand in a header."""
    return ",".join(f'"{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(count))


def test_a_fault_behind_as_many_tensors_as_a_file_may_hold_is_found_cheaply(tmp_path: Path) -> None:
    header = "{" + sound(MAX_TENSORS - 1) + ',"last":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}'
    (tmp_path / NAME).write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with little_memory():
        refused(SafetensorsFormat(), tmp_path / NAME, "last")


def test_a_file_may_hold_so_many_tensors_and_no_more(tmp_path: Path) -> None:
    for count, fits in ((MAX_TENSORS, True), (MAX_TENSORS + 1, False)):
        header = "{" + sound(count) + "}"
        (tmp_path / NAME).write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(count))
        with LocalStorage(tmp_path) as storage:
            if fits:
                assert len(SafetensorsFormat().catalogue(storage, storage.stat(NAME))) == count
            else:
                with pytest.raises(CorruptFile, match="over 131072 tensors"):
                    SafetensorsFormat().catalogue(storage, storage.stat(NAME))
