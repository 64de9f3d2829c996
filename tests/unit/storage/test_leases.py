"""Files are lent as they lie in the page cache, for as long as nobody may cut them, and no longer."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.memory_storage import MemoryStorage
from helpers.reading_ways import is_leased, let_go
from tensorferry.errors import LocateError, ReadError
from tensorferry.storage import pages
from tensorferry.storage.base import SupportsLease
from tensorferry.storage.handle import Handle
from tensorferry.storage.joined import JoinedStorage
from tensorferry.storage.local import LocalStorage

SIZE = (1 << 20) + 1234
DATA = b"".join(n.to_bytes(4, "little") for n in range(SIZE // 4 + 1))[:SIZE]
PATIENCE = 20.0


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[LocalStorage]:
    (tmp_path / "f").write_bytes(DATA)
    with LocalStorage(tmp_path) as opened:
        if refused(opened):
            pytest.skip("temporary files cannot be leased")
        yield opened


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lent_bytes(view: memoryview | None) -> bytes:
    assert view is not None
    return bytes(view)


def refused(storage: LocalStorage) -> bool:
    """Whether nothing of the file is lent."""
    with storage.lend("f", 0, 10) as view:
        return view is None


def test_it_is_a_storage_that_lends(storage: LocalStorage) -> None:
    assert isinstance(storage, SupportsLease)
    assert isinstance(JoinedStorage({"part": storage}), SupportsLease)


@pytest.mark.parametrize(("offset", "length"), [(0, SIZE), (1, 1), (4095, 2), (4096, 4096), (12345, 500_000)])
def test_what_is_lent_is_what_the_file_holds(storage: LocalStorage, offset: int, length: int) -> None:
    with storage.lend("f", offset, length) as view:
        assert lent_bytes(view) == DATA[offset : offset + length]


def test_a_part_lends_what_it_can(storage: LocalStorage) -> None:
    joined = JoinedStorage({"part": storage, "other": MemoryStorage({"f": DATA})})
    with joined.lend("part/f", 10, 20) as view:
        assert lent_bytes(view) == DATA[10:30]
    with joined.lend("other/f", 10, 20) as view:
        assert view is None


def test_the_file_is_leased_within_the_block_only(storage: LocalStorage, tmp_path: Path) -> None:
    assert not is_leased(tmp_path / "f")
    with storage.lend("f", 0, SIZE) as view:
        assert view is not None
        assert is_mapped(tmp_path / "f")
        assert is_leased(tmp_path / "f")
    assert not is_leased(tmp_path / "f")
    del view
    assert not is_mapped(tmp_path / "f")


def test_it_is_given_back_where_an_error_ends_the_block(storage: LocalStorage, tmp_path: Path) -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), storage.lend("f", 0, SIZE):
            raise error
        assert not is_leased(tmp_path / "f")


def test_a_view_that_is_kept_keeps_its_pages_and_no_lease(storage: LocalStorage, tmp_path: Path) -> None:
    with storage.lend("f", 0, SIZE) as view:
        pass
    assert not is_leased(tmp_path / "f")
    assert lent_bytes(view) == DATA


def test_the_last_of_those_that_copy_gives_the_lease_back(storage: LocalStorage, tmp_path: Path) -> None:
    with storage.lend("f", 0, 10):
        with storage.lend("f", 0, 10) as other:
            assert other is not None
        assert is_leased(tmp_path / "f")
    assert not is_leased(tmp_path / "f")


def test_threads_that_copy_at_the_same_time_leave_no_lease(storage: LocalStorage, tmp_path: Path) -> None:
    wrong: list[int] = []

    def copy() -> None:
        for n in range(200):
            with storage.lend("f", n, 5000) as view:
                if lent_bytes(view) != DATA[n : n + 5000]:
                    wrong.append(n)

    threads = [threading.Thread(target=copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not is_leased(tmp_path / "f")


def test_a_storage_that_is_closed_meanwhile_leaves_no_lease(storage: LocalStorage, tmp_path: Path) -> None:
    with storage.lend("f", 0, SIZE) as view:
        storage.close()
        assert lent_bytes(view) == DATA
    assert not is_leased(tmp_path / "f")
    with pytest.raises(ReadError, match="was closed"), storage.lend("f", 0, 1):
        pass


@pytest.mark.parametrize(
    "code", ["open(path, 'r+b').write(b'new')", "os.truncate(path, 5)", "open(path, 'wb')", "open(path, 'ab')"]
)
def test_another_process_that_wants_to_write_waits_for_copies_that_have_begun_and_no_more_begin(
    storage: LocalStorage, tmp_path: Path, code: str
) -> None:
    with storage.lend("f", 0, SIZE) as view:
        writer = subprocess.Popen([sys.executable, "-c", f"import os; path = {str(tmp_path / 'f')!r}; {code}"])
        until(lambda: refused(storage))
        assert writer.poll() is None
        assert lent_bytes(view) == DATA
    assert writer.wait(PATIENCE) == 0


def test_after_a_writer_has_gone_the_file_is_lent_again(storage: LocalStorage, tmp_path: Path) -> None:
    with storage.lend("f", 0, SIZE):
        assert is_leased(tmp_path / "f")
        assert refused(storage)
    assert not refused(storage)


def test_a_file_that_is_open_for_writing_is_not_lent(storage: LocalStorage, tmp_path: Path) -> None:
    with (tmp_path / "f").open("r+b"):
        assert refused(storage)
    assert not refused(storage)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_file_of_somebody_else_is_not_lent(storage: LocalStorage) -> None:
    os.seteuid(65534)
    try:
        assert refused(storage)
    finally:
        os.seteuid(0)
    assert not refused(storage)


def test_what_the_system_refuses_is_not_lent(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, command: int, argument: Any = 0) -> int:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "fcntl", refuse)
        assert refused(storage)
    with monkeypatch.context() as patched:
        patched.delattr(fcntl, "F_SETLEASE")
        assert refused(storage)
    with monkeypatch.context() as patched:
        patched.setattr(pages, "_POPULATE_READ", -1)
        assert refused(storage)
    assert not refused(storage)


def test_a_file_on_another_machine_is_not_lent(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handle, "is_elsewhere", True)
    assert refused(storage)


def test_what_is_not_in_the_page_cache_as_a_whole_is_not_lent(storage: LocalStorage, tmp_path: Path) -> None:
    let_go(tmp_path / "f")
    with (tmp_path / "f").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(8192)
    with storage.lend("f", 0, 8192) as view:
        assert lent_bytes(view) == DATA[:8192]
    with storage.lend("f", 0, SIZE) as view:
        assert view is None


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, SIZE + 1), (SIZE, 1), (SIZE + 100_000, 1)])
def test_what_is_not_in_the_file_is_not_lent(storage: LocalStorage, tmp_path: Path, offset: int, length: int) -> None:
    with storage.lend("f", offset, length) as view:
        assert view is None
    assert not is_leased(tmp_path / "f")


def test_a_file_that_was_cut_before_it_is_leased_is_not_lent(storage: LocalStorage, tmp_path: Path) -> None:
    os.truncate(tmp_path / "f", 100)
    with storage.lend("f", 0, 5000) as view:
        assert view is None


def test_a_file_that_is_not_there_is_an_error_as_for_a_read(storage: LocalStorage) -> None:
    with pytest.raises(LocateError, match="nowhere"), storage.lend("nowhere", 0, 1):
        pass


def test_no_signal_tells_of_a_writer_and_none_is_treated_otherwise(storage: LocalStorage, tmp_path: Path) -> None:
    told: list[int] = []
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    signals = (signal.SIGIO, signal.SIGURG)
    for number in signals:
        signal.signal(number, lambda number, frame: told.append(number))
    try:
        with storage.lend("f", 0, 10):
            assert is_leased(tmp_path / "f")
        assert told == []
    finally:
        for number in signals:
            signal.signal(number, before[number])
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
