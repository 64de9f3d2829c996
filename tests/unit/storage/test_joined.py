"""Several storages behave as one, each below a name of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorferry.errors import LocateError, ReadError
from tensorferry.storage.base import Storage, SupportsReadAhead, SupportsScatter
from tensorferry.storage.joined import JoinedStorage
from tensorferry.storage.local import LocalStorage


@pytest.fixture
def joined(tmp_path: Path) -> JoinedStorage:
    for name, content in (("one", b"abcdef"), ("two", b"ghij")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(content)
    return JoinedStorage({name: LocalStorage(tmp_path / name) for name in ("one", "two")})


def test_it_is_a_storage_with_the_abilities_of_its_parts(joined: JoinedStorage) -> None:
    storage: Storage = joined
    assert isinstance(storage, SupportsScatter)
    assert isinstance(storage, SupportsReadAhead)


def test_files_are_listed_below_the_name_of_their_part(joined: JoinedStorage) -> None:
    assert [(f.path, f.size) for f in joined.list()] == [("one/file", 6), ("two/file", 4)]
    assert joined.stat("two/file") == joined.list()[1]


def test_reads_go_to_the_part_that_a_path_begins_with(joined: JoinedStorage) -> None:
    out, more = bytearray(2), bytearray(1)
    joined.read_into("two/file", 1, memoryview(out))
    assert out == b"hi"
    joined.read_vector("one/file", 2, [memoryview(out), memoryview(more)])
    assert out + more == b"cde"
    joined.read_ahead("one/file", 0, 6)


class PlainStorage:
    """A storage without any optional ability."""

    def __init__(self, inner: LocalStorage) -> None:
        for name in ("list", "stat", "read_into", "check_unchanged", "close"):
            setattr(self, name, getattr(inner, name))
        self.uri = inner.uri


def test_parts_need_no_optional_ability(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    part: Storage = PlainStorage(LocalStorage(tmp_path))  # type: ignore[assignment]
    joined = JoinedStorage({"p": part})
    one, two = bytearray(2), bytearray(3)
    joined.read_vector("p/file", 1, [memoryview(one), memoryview(two)])
    assert one + two == b"bcdef"
    joined.read_ahead("p/file", 0, 6)


def test_a_path_of_no_part_is_refused_with_the_parts_that_there_are(joined: JoinedStorage) -> None:
    with pytest.raises(LocateError, match=r"no part is called 'three'; there are one, two"):
        joined.stat("three/file")


def test_a_change_in_any_part_is_found_and_closing_closes_all(joined: JoinedStorage, tmp_path: Path) -> None:
    joined.read_into("two/file", 0, memoryview(bytearray(1)))
    joined.check_unchanged()
    (tmp_path / "two" / "file").write_bytes(b"changed")
    with pytest.raises(ReadError, match="changed"):
        joined.check_unchanged()
    joined.close()
    joined.close()
    with pytest.raises(ReadError, match="closed"):
        joined.read_into("one/file", 0, memoryview(bytearray(1)))


def test_its_uri_names_every_place(joined: JoinedStorage, tmp_path: Path) -> None:
    assert joined.uri == f"{tmp_path / 'one'} + {tmp_path / 'two'}"
