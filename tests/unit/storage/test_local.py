"""What a folder of this machine does as a storage: listing, containment, reading, noticing change."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import pytest
import torch

from tensorferry.errors import AccessDenied, LocateError, ReadError, UnsafeFile
from tensorferry.storage.base import Storage, SupportsMap
from tensorferry.storage.local import Counters, LocalStorage

DATA = bytes(range(256)) * 4


def read(storage: LocalStorage, path: str, offset: int, length: int) -> bytes:
    out = bytearray(length)
    storage.read_into(path, offset, memoryview(out))
    return bytes(out)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoint"
    (root / "sub").mkdir(parents=True)
    (root / "b.safetensors").write_bytes(DATA)
    (root / "a.safetensors").write_bytes(DATA[::-1])
    (root / "sub" / "c.safetensors").write_bytes(b"sub")
    (root / ".hidden.safetensors").write_bytes(b"no")
    return root


def test_it_is_a_storage_that_can_map(folder: Path) -> None:
    storage: Storage = LocalStorage(folder)
    assert isinstance(storage, SupportsMap)
    assert storage.uri == str(folder)
    storage.close()


class TestListing:
    def test_it_lists_files_sorted_without_sub_folders_and_dot_files(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            assert [(file.path, file.size) for file in storage.list()] == [
                ("a.safetensors", 1024),
                ("b.safetensors", 1024),
            ]

    def test_what_it_lists_is_what_it_stats(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            assert [storage.stat(file.path) for file in storage.list()] == storage.list()

    def test_a_link_is_listed_with_the_size_of_its_target(self, folder: Path) -> None:
        (folder / "link.safetensors").symlink_to("sub/c.safetensors")
        with LocalStorage(folder) as storage:
            assert storage.list()[-1].size == 3

    def test_a_broken_link_is_listed_as_one(self, folder: Path) -> None:
        (folder / "z.safetensors").symlink_to("../../blobs/nope")
        with LocalStorage(folder) as storage:
            broken = storage.list()[-1]
            assert (broken.path, broken.size, broken.broken) == ("z.safetensors", 0, "../../blobs/nope")
            with pytest.raises(LocateError, match=r"broken link z\.safetensors .*-> \.\./\.\./blobs/nope"):
                storage.stat("z.safetensors")

    def test_a_link_to_itself_is_broken(self, folder: Path) -> None:
        (folder / "z.safetensors").symlink_to("z.safetensors")
        with LocalStorage(folder) as storage:
            assert storage.list()[-1].broken == "z.safetensors"
            with pytest.raises(LocateError, match="broken link"):
                storage.stat("z.safetensors")

    def test_a_file_in_a_sub_folder_has_a_relative_path(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            assert storage.stat("sub/c.safetensors").size == 3
            assert read(storage, "sub/c.safetensors", 0, 3) == b"sub"

    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(LocateError, match="nowhere"):
            LocalStorage(tmp_path / "nowhere")

    def test_a_file_is_no_folder(self, folder: Path) -> None:
        with pytest.raises(LocateError, match="not a folder"):
            LocalStorage(folder / "a.safetensors")

    def test_a_name_that_is_not_utf8_is_listed_and_read(self, tmp_path: Path) -> None:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.bin")).write_bytes(b"x")
        with LocalStorage(tmp_path) as storage:
            assert read(storage, storage.list()[0].path, 0, 1) == b"x"


class TestContainment:
    @pytest.mark.parametrize(
        "path",
        [
            *("", ".", "..", "../b.safetensors", "sub/../b.safetensors", "sub/../../x", "./b.safetensors", "sub//c"),
            *("sub/", "/etc/passwd", "//etc/passwd", "a\0b", "sub\\c", "file:///etc/passwd", "http://host/x", "C:x"),
            *("~/../x", "\ud800.safetensors"),
        ],
    )
    def test_only_plain_relative_paths_are_taken(self, folder: Path, path: str) -> None:
        with LocalStorage(folder) as storage, pytest.raises(UnsafeFile, match="plain relative path"):
            storage.stat(path)

    @pytest.mark.parametrize("path", ["sub/c.safetensors", "..a", "a..b", "~", "-", "ü", "a b", "a\nb"])
    def test_odd_names_inside_are_fine(self, folder: Path, path: str) -> None:
        (folder / path).write_bytes(b"odd")
        with LocalStorage(folder) as storage:
            assert read(storage, path, 0, 3) == b"odd"

    def test_a_link_that_leads_out_is_refused(self, folder: Path) -> None:
        (folder.parent / "x.safetensors").write_bytes(DATA)
        (folder / "out.safetensors").symlink_to("../x.safetensors")
        with LocalStorage(folder) as storage:
            for ask in (lambda: storage.stat("out.safetensors"), lambda: read(storage, "out.safetensors", 0, 1)):
                with pytest.raises(UnsafeFile, match="leads out of its folder"):
                    ask()

    def test_a_linked_sub_folder_that_leads_out_is_refused(self, folder: Path) -> None:
        (folder / "up").symlink_to("..")
        with LocalStorage(folder) as storage:
            (folder.parent / "x").write_bytes(DATA)
            with pytest.raises(UnsafeFile, match="leads out"):
                read(storage, "up/x", 0, 1)
            assert read(storage, "up/checkpoint/b.safetensors", 0, 4) == DATA[:4]

    def test_a_folder_whose_name_merely_begins_the_same_is_outside(self, folder: Path) -> None:
        beside = folder.with_name("checkpoint-2")
        beside.mkdir()
        (beside / "x").write_bytes(DATA)
        (folder / "x").symlink_to(beside / "x")
        with LocalStorage(folder) as storage, pytest.raises(UnsafeFile, match="leads out"):
            storage.stat("x")

    def test_the_folder_itself_may_be_a_link(self, folder: Path) -> None:
        link = folder.with_name("link")
        link.symlink_to(folder)
        with LocalStorage(link) as storage:
            assert storage.uri == str(link)
            assert read(storage, "b.safetensors", 0, 8) == DATA[:8]

    def test_a_hub_cache_may_link_to_its_blobs_and_no_further(self, tmp_path: Path) -> None:
        repository = tmp_path / "models--org--name"
        snapshot = repository / "snapshots" / "0123"
        (snapshot / "sub").mkdir(parents=True)
        (repository / "blobs").mkdir()
        (repository / "blobs" / "aa").write_bytes(b"blob")
        (tmp_path / "secret").write_bytes(b"secret")
        (snapshot / "model.safetensors").symlink_to("../../blobs/aa")
        (snapshot / "sub" / "model.safetensors").symlink_to("../../../blobs/aa")
        (snapshot / "bad.safetensors").symlink_to("../../../secret")
        for root in (snapshot, snapshot / "sub"):
            with LocalStorage(root) as storage:
                assert read(storage, "model.safetensors", 0, 4) == b"blob"
        with LocalStorage(snapshot) as storage, pytest.raises(UnsafeFile, match="leads out"):
            storage.stat("bad.safetensors")

    @pytest.mark.parametrize("ask", ["stat", "read_into", "map"])
    def test_a_pipe_is_refused_and_does_not_block(self, folder: Path, ask: str) -> None:
        os.mkfifo(folder / "pipe")
        with LocalStorage(folder) as storage, pytest.raises(UnsafeFile, match=r"pipe \(FIFO\)"):
            getattr(storage, ask)(*(("pipe", 0, memoryview(bytearray(1))) if ask == "read_into" else ("pipe",)))

    def test_a_socket_and_a_folder_are_no_files(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)  # the name of a socket has a short limit
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("s")
            with LocalStorage(folder) as storage:
                with pytest.raises(UnsafeFile, match="a socket"):
                    storage.stat("s")
                with pytest.raises(LocateError, match="is a folder"):
                    storage.stat("sub")

    def test_an_absent_file_is_named_with_its_folder(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            for path in ("absent.bin", "b.safetensors/x", "sub/absent"):
                with pytest.raises(LocateError) as refusal:
                    storage.stat(path)
                assert path in str(refusal.value)
                assert str(folder) in str(refusal.value)


class TestReading:
    def test_it_fills_exactly_what_is_asked(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            assert read(storage, "b.safetensors", 250, 10) == DATA[250:260]
            assert read(storage, "b.safetensors", 1024, 0) == b""

    def test_any_contiguous_memory_can_be_filled(self, folder: Path) -> None:
        out = bytearray(12)
        with LocalStorage(folder) as storage:
            storage.read_into("b.safetensors", 4, memoryview(out).cast("H", (2, 3)))
        assert out == DATA[4:16]

    def test_one_range_can_fill_several_buffers(self, folder: Path) -> None:
        outs = [bytearray(3), bytearray(0), bytearray(5), bytearray(1)]
        with LocalStorage(folder) as storage:
            storage.read_vector("b.safetensors", 7, [memoryview(out) for out in outs])
            assert storage.counters == Counters(bytes_read=9, reads=1)
        assert b"".join(outs) == DATA[7:16]

    def test_more_buffers_than_one_system_call_takes_are_filled(self, tmp_path: Path) -> None:
        data = os.urandom(5000)
        (tmp_path / "x").write_bytes(data)
        outs = [bytearray(2) for _ in range(2500)]
        with LocalStorage(tmp_path) as storage:
            storage.read_vector("x", 0, [memoryview(out) for out in outs])
            assert storage.counters == Counters(bytes_read=5000, reads=1)
        assert b"".join(outs) == data

    def test_short_reads_are_continued(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.preadv

        def short(fd: int, views: Sequence[memoryview], offset: int) -> int:
            return real(fd, [views[0][:3]], offset)

        monkeypatch.setattr(os, "preadv", short)
        outs = [bytearray(2), bytearray(7), bytearray(4)]
        with LocalStorage(folder) as storage:
            storage.read_vector("b.safetensors", 5, [memoryview(out) for out in outs])
            assert storage.counters == Counters(bytes_read=13, reads=1)
        assert b"".join(outs) == DATA[5:18]

    def test_the_end_of_the_file_is_an_error_with_all_its_numbers(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            with pytest.raises(ReadError, match=r"b\.safetensors.* wanted 10 bytes at offset 1020, got 4"):
                read(storage, "b.safetensors", 1020, 10)
            assert storage.counters == Counters()

    @pytest.mark.parametrize("offset", [-1, 2**63 - 1, 2**70])
    def test_an_offset_that_no_file_has_is_an_error(self, folder: Path, offset: int) -> None:
        with LocalStorage(folder) as storage, pytest.raises(ReadError, match="no part of any file"):
            read(storage, "b.safetensors", offset, 1)

    def test_an_error_of_the_disk_names_file_and_offset(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with LocalStorage(folder) as storage:
            monkeypatch.setattr(os, "preadv", broken)
            with pytest.raises(ReadError, match=r"b\.safetensors.*Input/output error, while reading at offset 5"):
                read(storage, "b.safetensors", 5, 1)

    def test_a_refusal_of_the_system_is_access_denied(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> int:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        with LocalStorage(folder) as storage:
            monkeypatch.setattr(os, "open", refused)
            with pytest.raises(AccessDenied, match=r"b\.safetensors.*Permission denied"):
                read(storage, "b.safetensors", 0, 1)

    def test_many_threads_read_many_files_exactly(self, folder: Path) -> None:
        names = [f"shard-{n}" for n in range(12)]
        for n, name in enumerate(names):
            (folder / name).write_bytes(bytes([n]) * 1000)
        wrong: list[str] = []

        def work(storage: LocalStorage) -> None:
            for at in range(200):
                n = at % len(names)
                if read(storage, names[n], at, 7) != bytes([n]) * 7:
                    wrong.append(names[n])

        with LocalStorage(folder, max_open=3) as storage:
            threads = [threading.Thread(target=work, args=(storage,)) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert storage.counters == Counters(bytes_read=6 * 200 * 7, reads=6 * 200)
        assert wrong == []


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Hanging:
    """Opening b.safetensors, which goes on when it is told to. times: how often it was begun."""

    def __init__(self) -> None:
        self.began, self.goes_on, self.times = threading.Event(), threading.Event(), 0


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    told, real = Hanging(), os.open

    def slow(path: str, flags: int) -> int:
        if path.endswith("b.safetensors"):
            told.times += 1
            told.began.set()
            told.goes_on.wait(30)
        return real(path, flags)

    monkeypatch.setattr(os, "open", slow)
    yield told
    told.goes_on.set()


class TestOpenFiles:
    def test_a_bounded_number_stays_open(self, tmp_path: Path) -> None:
        for n in range(50):
            (tmp_path / f"{n}").write_bytes(b"x")
        before = open_files()
        with LocalStorage(tmp_path, max_open=8) as storage:
            for n in range(50):
                read(storage, f"{n}", 0, 1)
            assert open_files() == before + 8
        assert open_files() == before

    def test_more_shards_than_the_process_may_open_are_no_trouble(self, tmp_path: Path) -> None:
        for n in range(500):
            (tmp_path / f"{n}").write_bytes(b"x")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 140, hard))
        try:
            with LocalStorage(tmp_path) as storage:
                assert all(read(storage, f"{n}", 0, 1) == b"x" for n in range(500))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_a_file_is_opened_once(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[str] = []
        real = os.open

        def noted(path: str, flags: int) -> int:
            opened.append(path)
            return real(path, flags)

        monkeypatch.setattr(os, "open", noted)
        with LocalStorage(folder) as storage:
            for _ in range(3):
                read(storage, "b.safetensors", 0, 1)
        assert opened == [str(folder / "b.safetensors")]

    def test_a_file_that_many_threads_want_is_opened_once(self, folder: Path, hanging: Hanging) -> None:
        with LocalStorage(folder) as storage:
            threads = [threading.Thread(target=read, args=(storage, "b.safetensors", 0, 1)) for _ in range(8)]
            for thread in threads:
                thread.start()
            assert hanging.began.wait(10)
            hanging.goes_on.set()
            for thread in threads:
                thread.join()
            assert hanging.times == 1

    def test_an_opening_that_hangs_holds_up_no_other_file_and_no_closing(self, folder: Path, hanging: Hanging) -> None:
        before = open_files()
        storage, met = LocalStorage(folder), []

        def late() -> None:
            try:
                read(storage, "b.safetensors", 0, 1)
            except ReadError as error:
                met.append(str(error))

        thread = threading.Thread(target=late)
        thread.start()
        assert hanging.began.wait(10)
        assert read(storage, "a.safetensors", 0, 2) == DATA[::-1][:2]
        assert storage.uncached("a.safetensors").why is not None
        assert len(storage.map("a.safetensors")) == len(DATA)
        storage.check_unchanged()
        storage.close()
        hanging.goes_on.set()
        thread.join()
        assert len(met) == 1
        assert "b.safetensors" in met[0]
        assert "its storage was closed" in met[0]
        assert open_files() == before

    def test_what_could_not_be_opened_is_tried_again(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open
        fails = [True]

        def flaky(path: str, flags: int) -> int:
            if fails.pop() if fails else False:
                raise OSError(errno.EIO, "Input/output error", path)
            return real(path, flags)

        with LocalStorage(folder) as storage:
            monkeypatch.setattr(os, "open", flaky)
            with pytest.raises(ReadError, match="Input/output error"):
                read(storage, "b.safetensors", 0, 1)
            assert read(storage, "b.safetensors", 0, 1) == DATA[:1]

    def test_after_closing_nothing_is_read(self, folder: Path) -> None:
        storage = LocalStorage(folder)
        read(storage, "b.safetensors", 0, 1)
        storage.close()
        storage.close()
        with pytest.raises(ReadError, match="closed"):
            read(storage, "b.safetensors", 0, 1)

    def test_a_refused_file_leaves_nothing_open(self, folder: Path) -> None:
        os.mkfifo(folder / "pipe")
        before = open_files()
        with LocalStorage(folder) as storage:
            for path in ("pipe", "absent", "sub"):
                with pytest.raises((UnsafeFile, LocateError)):
                    read(storage, path, 0, 1)
            assert open_files() == before

    def test_a_pipe_put_in_place_of_a_checked_file_does_not_block(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.open

        def swapped(path: str, flags: int) -> int:
            Path(path).unlink()
            os.mkfifo(path)
            return real(path, flags)

        with LocalStorage(folder) as storage:
            monkeypatch.setattr(os, "open", swapped)
            with pytest.raises(UnsafeFile, match="pipe"):
                read(storage, "b.safetensors", 0, 1)

    def test_a_link_put_in_place_of_a_checked_file_is_not_followed(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.open

        def swapped(path: str, flags: int) -> int:
            Path(path).unlink()
            Path(path).symlink_to("/etc/passwd")
            return real(path, flags)

        with LocalStorage(folder) as storage:
            monkeypatch.setattr(os, "open", swapped)
            with pytest.raises(LocateError, match="symbolic links"):
                read(storage, "b.safetensors", 0, 1)


class TestChange:
    def test_a_file_that_stays_the_same_is_unchanged(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            read(storage, "b.safetensors", 0, 1)
            (folder / "a.safetensors").write_bytes(b"never read")
            storage.check_unchanged()

    def refuse(self, storage: LocalStorage, says: str) -> None:
        with pytest.raises(ReadError, match=says) as refusal:
            storage.check_unchanged()
        assert "b.safetensors" in str(refusal.value)
        assert "cannot be trusted" in str(refusal.value)

    def test_a_file_that_was_cut_is_noticed(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            read(storage, "b.safetensors", 0, 1)
            os.truncate(folder / "b.safetensors", 1000)
            self.refuse(storage, "its size went from 1024 to 1000 bytes")

    def test_a_file_that_was_written_to_is_noticed(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            read(storage, "b.safetensors", 0, 1)
            os.utime(folder / "b.safetensors", ns=(1, 1))
            self.refuse(storage, "it was written to")

    def test_a_file_that_was_replaced_is_noticed(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            read(storage, "b.safetensors", 0, 1)
            (folder / "a.safetensors").replace(folder / "b.safetensors")
            self.refuse(storage, "another file took its place")

    def test_a_file_that_was_removed_is_noticed(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            read(storage, "b.safetensors", 0, 1)
            (folder / "b.safetensors").unlink()
            self.refuse(storage, "no longer there")

    def test_a_replaced_file_is_noticed_when_it_has_to_be_opened_again(self, folder: Path) -> None:
        with LocalStorage(folder, max_open=1) as storage:
            read(storage, "b.safetensors", 0, 1)
            read(storage, "sub/c.safetensors", 0, 1)
            (folder / "a.safetensors").replace(folder / "b.safetensors")
            with pytest.raises(ReadError, match="another file took its place"):
                read(storage, "b.safetensors", 0, 1)

    def test_a_closed_file_that_changed_is_noticed_at_the_end(self, folder: Path) -> None:
        with LocalStorage(folder, max_open=1) as storage:
            read(storage, "b.safetensors", 0, 1)
            read(storage, "sub/c.safetensors", 0, 1)
            os.truncate(folder / "b.safetensors", 2000)
            self.refuse(storage, "its size went from 1024 to 2000 bytes")


class TestMapping:
    def test_a_mapping_is_all_of_the_file_and_read_only(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            view = storage.map("b.safetensors")
            assert view == DATA
            assert view.readonly
            assert storage.map("b.safetensors") is view
            assert storage.counters == Counters()

    def test_it_ends_with_the_storage_and_its_last_user(self, folder: Path) -> None:
        before = open_files()
        storage = LocalStorage(folder)
        view = storage.map("b.safetensors")
        storage.close()
        assert view == DATA
        del view
        assert open_files() == before

    def test_arrays_made_from_it_outlive_the_storage(self, folder: Path) -> None:
        storage = LocalStorage(folder)
        array = numpy.frombuffer(storage.map("b.safetensors"), dtype=numpy.uint8)
        tensor = torch.frombuffer(bytearray(DATA), dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mapped = torch.frombuffer(storage.map("b.safetensors"), dtype=torch.uint8)
        storage.close()
        assert array.tobytes() == DATA
        assert torch.equal(mapped, tensor)

    def test_an_empty_file_is_an_empty_view(self, folder: Path) -> None:
        (folder / "empty").write_bytes(b"")
        with LocalStorage(folder) as storage:
            assert len(storage.map("empty")) == 0

    def test_a_mapped_file_is_watched_for_change(self, folder: Path) -> None:
        with LocalStorage(folder) as storage:
            storage.map("b.safetensors")
            os.utime(folder / "b.safetensors", ns=(1, 1))
            with pytest.raises(ReadError, match=r"b\.safetensors"):
                storage.check_unchanged()
