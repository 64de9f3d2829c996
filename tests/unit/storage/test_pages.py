"""Memory has the pages of files until it is told to have its own, and nobody who uses it notices."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from tensorferry.storage import pages
from tensorferry.storage.pages import PAGE, Pages, can_borrow

pytestmark = pytest.mark.skipif(not can_borrow(), reason="this system cannot be asked for pages")

DATA = bytes(range(256)) * (5 * PAGE // 256)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "borrowed-file").write_bytes(DATA)
    return tmp_path / "borrowed-file"


def made(path: Path, begin: int = 24, offset: int = PAGE, pieces: int = 2) -> tuple[Pages, memoryview]:
    """Return three pages of memory, of which the first ones are those of the file."""
    found = Pages(begin, 2 * PAGE + 100)
    fd = os.open(path, os.O_RDONLY)
    found.borrow(fd, offset, 0, pieces * PAGE)
    os.close(fd)  # mappings need none
    return found, memoryview(found.take()).cast("B")


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_what_is_borrowed_is_what_the_file_holds_and_the_rest_is_zero(path: Path) -> None:
    found, memory = made(path)
    assert (found.lead, found.size, len(memory), found.borrowed) == (24, 3 * PAGE, 3 * PAGE, 2 * PAGE)
    assert bytes(memory) == DATA[PAGE : 3 * PAGE] + bytes(PAGE)


def test_the_address_is_as_asked_for(path: Path) -> None:
    found, memory = made(path)
    import ctypes

    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert at % PAGE == 0
    assert found.is_at(at)
    assert found.is_at(at + 3 * PAGE - 1)
    assert not found.is_at(at - 1)
    assert not found.is_at(at + 3 * PAGE)


def test_what_is_written_stays_in_this_process(path: Path) -> None:
    found, memory = made(path)
    memory[10:13] = b"new"
    assert path.read_bytes() == DATA
    assert found.own()
    assert bytes(memory[9:14]) == DATA[PAGE + 9 : PAGE + 10] + b"new" + DATA[PAGE + 13 : PAGE + 14]


@pytest.mark.parametrize("writes", [(), (10, PAGE, 2 * PAGE)])
def test_pages_that_are_our_own_do_not_change_with_the_file(path: Path, writes: tuple[int, ...]) -> None:
    found, memory = made(path)
    assert found.bring(0, 2 * PAGE)
    expected = bytearray(DATA[PAGE : 3 * PAGE] + bytes(PAGE))
    for at in writes:
        memory[at] = expected[at] = 99
    assert found.own()
    assert found.borrowed == 0
    with path.open("r+b") as file:
        file.write(bytes(len(DATA)))
    os.truncate(path, 0)
    assert bytes(memory) == expected
    memory[5] = 1  # can be written to


def test_much_is_made_our_own_by_and_by(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_OWNED_AT_ONCE", PAGE)
    found, memory = made(path)
    assert found.own()
    os.truncate(path, 0)
    assert bytes(memory) == DATA[PAGE : 3 * PAGE] + bytes(PAGE)


def test_what_is_dropped_is_zero(path: Path) -> None:
    found, memory = made(path)
    memory[0] = 7
    found.drop()
    found.drop()
    assert bytes(memory) == bytes(3 * PAGE)
    assert not is_mapped(path)
    assert found.own()


def test_the_memory_goes_with_its_last_user(path: Path) -> None:
    found, memory = made(path)
    part = memory[5:6]
    del memory
    assert (found.is_in_use, is_mapped(path)) == (True, True)
    del part
    gc.collect()
    assert (found.is_in_use, is_mapped(path)) == (False, False)
    assert found.own()
    assert found.borrowed == 0


def test_memory_that_nobody_took_goes_with_the_pages(path: Path) -> None:
    found = Pages(0, PAGE)
    fd = os.open(path, os.O_RDONLY)
    found.borrow(fd, 0, 0, PAGE)
    os.close(fd)
    assert is_mapped(path)
    del found
    gc.collect()
    assert not is_mapped(path)


def test_what_the_file_does_not_have_any_more_is_said_and_not_touched(path: Path) -> None:
    found, memory = made(path)
    os.truncate(path, PAGE)
    assert not found.bring(0, 2 * PAGE)
    assert not found.own()
    assert found.borrowed == 2 * PAGE
    found.drop()
    assert bytes(memory) == bytes(3 * PAGE)


def test_where_there_is_no_room_it_says_so(path: Path) -> None:
    with pytest.raises(MemoryError, match="could not be mapped"):
        Pages(0, 1 << 60)
    found = Pages(0, PAGE)
    with pytest.raises(MemoryError, match="could not be mapped"):
        found.borrow(-1, 0, 0, PAGE)
