"""What every storage keeps to. Subclass `StorageConformance` to hold a storage of your own to it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tensorferry.errors import LocateError, ReadError, TensorferryError, UnsafeFile
from tensorferry.storage.base import Storage, SupportsMap, SupportsNested, SupportsReadAhead, SupportsScatter

__all__ = ["FILES", "StorageConformance"]

FILES = {
    "a.bin": bytes(range(256)) * 40,
    "b.safetensors": b"0123456789",
    "empty": b"",
    "sub/inner.bin": b"below",
    ".hidden": b"no",
}


class StorageConformance(ABC):
    """Give `storage`: one that holds `files`, some of them in sub-folders; `prefix` where it names them otherwise."""

    prefix = ""

    @abstractmethod
    def storage(self, files: Mapping[str, bytes], folder: Path) -> Storage:
        """Return a storage of `files`; `folder` is an empty folder of this machine to use or not."""

    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[Storage]:
        before = set(threading.enumerate())
        storage = self.storage(FILES, tmp_path)
        yield storage
        storage.close()
        assert set(threading.enumerate()) == before

    def read(self, storage: Storage, name: str, offset: int, length: int) -> bytes:
        out = bytearray(length)
        storage.read_into(self.prefix + name, offset, memoryview(out))
        return bytes(out)

    def test_it_says_where_it_is(self, opened: Storage) -> None:
        assert isinstance(opened.uri, str)
        assert opened.uri

    def test_the_listing_is_sorted_and_has_neither_sub_folders_nor_dot_files(self, opened: Storage) -> None:
        assert [f.path for f in opened.list()] == [self.prefix + n for n in ("a.bin", "b.safetensors", "empty")]
        assert [f.size for f in opened.list()] == [10240, 10, 0]
        assert not any(f.broken for f in opened.list())

    def test_stat_agrees_with_the_listing(self, opened: Storage) -> None:
        assert [opened.stat(f.path) for f in opened.list()] == list(opened.list())

    def test_stat_finds_files_in_sub_folders(self, opened: Storage) -> None:
        assert opened.stat(self.prefix + "sub/inner.bin").size == 5

    def test_files_one_level_below_are_told_and_no_others(self, opened: Storage) -> None:
        if not isinstance(opened, SupportsNested):
            pytest.skip("this storage does not look into sub-folders")
        assert list(opened.nested()) == ["sub/inner.bin"]

    def test_identities_of_different_files_differ(self, opened: Storage) -> None:
        identities = [f.identity for f in opened.list()]
        assert len(set(identities)) == len(identities)

    @pytest.mark.parametrize(("offset", "length"), [(0, 10240), (0, 1), (255, 2), (10239, 1), (1000, 4096)])
    def test_a_range_is_read_exactly(self, opened: Storage, offset: int, length: int) -> None:
        assert self.read(opened, "a.bin", offset, length) == FILES["a.bin"][offset : offset + length]

    def test_sub_folders_can_be_read(self, opened: Storage) -> None:
        assert self.read(opened, "sub/inner.bin", 1, 3) == b"elo"

    def test_nothing_can_be_read_anywhere_in_a_file(self, opened: Storage) -> None:
        assert self.read(opened, "a.bin", 10240, 0) == b""
        assert self.read(opened, "empty", 0, 0) == b""

    def test_part_of_a_larger_buffer_is_filled_and_no_more(self, opened: Storage) -> None:
        out = bytearray(b"..........")
        opened.read_into(self.prefix + "b.safetensors", 2, memoryview(out)[3:6])
        assert out == b"...234...."

    @pytest.mark.parametrize(("offset", "length"), [(10, 1), (9, 2), (0, 11), (1 << 40, 1), (2**63, 1)])
    def test_a_range_that_leaves_the_file_is_an_error_with_its_name(
        self, opened: Storage, offset: int, length: int
    ) -> None:
        with pytest.raises(ReadError, match=r"b\.safetensors"):
            self.read(opened, "b.safetensors", offset, length)

    def test_what_is_not_there_is_an_error_with_its_name(self, opened: Storage) -> None:
        with pytest.raises(LocateError, match=r"nope\.bin"):
            opened.stat(self.prefix + "nope.bin")
        with pytest.raises(LocateError, match=r"nope\.bin"):
            self.read(opened, "nope.bin", 0, 1)

    @pytest.mark.parametrize("path", ["../outside", "sub/../../outside", "/etc/passwd"])
    def test_nothing_outside_is_found_or_read(self, opened: Storage, tmp_path: Path, path: str) -> None:
        (tmp_path.parent / "outside").write_bytes(b"secret")
        with pytest.raises((UnsafeFile, LocateError)):
            opened.stat(self.prefix + path)
        with pytest.raises((UnsafeFile, LocateError)):
            self.read(opened, path, 0, 1)

    def test_many_threads_may_read_at_once(self, opened: Storage) -> None:
        random = Random(0)
        ranges = [(a, random.randint(1, 300)) for a in (random.randint(0, 9900) for _ in range(400))]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda r: self.read(opened, "a.bin", *r), ranges))
        assert found == [FILES["a.bin"][a : a + n] for a, n in ranges]

    def test_files_that_nobody_touched_are_unchanged(self, opened: Storage) -> None:
        self.read(opened, "a.bin", 0, 10)
        opened.check_unchanged()

    def test_closing_is_idempotent_and_ends_reading(self, opened: Storage) -> None:
        self.read(opened, "a.bin", 0, 10)
        opened.close()
        opened.close()
        with pytest.raises(TensorferryError):
            self.read(opened, "a.bin", 0, 10)

    def test_one_range_fills_several_buffers(self, opened: Storage) -> None:
        if not isinstance(opened, SupportsScatter):
            pytest.skip("this storage fills one buffer at a time")
        outs = [bytearray(n) for n in (3, 0, 1, 5)]
        opened.read_vector(self.prefix + "b.safetensors", 1, [memoryview(out) for out in outs])
        assert [bytes(out) for out in outs] == [b"123", b"", b"4", b"56789"]
        with pytest.raises(ReadError, match=r"b\.safetensors"):
            opened.read_vector(self.prefix + "b.safetensors", 2, [memoryview(out) for out in outs])

    def test_a_mapping_is_the_file_and_cannot_be_written_to(self, opened: Storage) -> None:
        if not isinstance(opened, SupportsMap):
            pytest.skip("this storage cannot map files")
        view = opened.map(self.prefix + "a.bin")
        assert view.readonly
        assert bytes(view) == FILES["a.bin"]
        assert len(opened.map(self.prefix + "empty")) == 0
        opened.close()
        assert bytes(view[250:260]) == FILES["a.bin"][250:260]

    def test_a_hint_of_reads_to_come_changes_nothing(self, opened: Storage) -> None:
        if not isinstance(opened, SupportsReadAhead):
            pytest.skip("this storage takes no hints")
        opened.read_ahead(self.prefix + "a.bin", 0, 1 << 30)
        assert self.read(opened, "a.bin", 5, 3) == bytes([5, 6, 7])
        with pytest.raises(LocateError):
            opened.read_ahead(self.prefix + "nope.bin", 0, 1)
