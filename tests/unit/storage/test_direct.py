"""Reads past the page cache: what lands where, what is copied on, and what the page cache holds meanwhile."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.reading_ways import let_go
from tensorferry.errors import ReadError
from tensorferry.storage import direct, file_systems, handle, page_cache, touching
from tensorferry.storage.base import SupportsUncached
from tensorferry.storage.blocks import HUGE
from tensorferry.storage.direct import MOST, SPARE, DirectFile, Spare
from tensorferry.storage.joined import JoinedStorage
from tensorferry.storage.libc import address
from tensorferry.storage.local import LocalStorage

PAGE = mmap.PAGESIZE
SIZE = 3 * SPARE + 1234
DATA = b"".join(n.to_bytes(4, "little") for n in range(SIZE // 4 + 1))[:SIZE]


def page_aligned(nbytes: int, lead: int = 0) -> memoryview:
    """Return bytes whose address is `lead` modulo the size of a page."""
    return memoryview(mmap.mmap(-1, nbytes + lead + PAGE))[lead : lead + nbytes]


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[LocalStorage]:
    (tmp_path / "f").write_bytes(DATA)
    let_go(tmp_path / "f")
    with LocalStorage(tmp_path) as opened:
        if not opened.uncached("f").possible:
            pytest.skip(f"direct reads: {opened.uncached('f').why}")
        yield opened


def test_it_is_a_storage_behind_a_page_cache(storage: LocalStorage) -> None:
    assert isinstance(storage, SupportsUncached)
    assert isinstance(JoinedStorage({"part": storage}), SupportsUncached)


def test_what_lies_in_memory_as_in_the_file_is_not_copied_but_for_its_ends(storage: LocalStorage) -> None:
    out = page_aligned(2 * SPARE, lead=1000)
    copied = storage.read_uncached("f", 1000, [out])
    assert out == DATA[1000 : 1000 + 2 * SPARE]
    assert copied is not None
    assert 0 < copied < 2 * PAGE


def test_whole_pages_are_not_copied_at_all(storage: LocalStorage) -> None:
    out = page_aligned(8 * PAGE)
    assert storage.read_uncached("f", 4 * PAGE, [out]) == 0
    assert out == DATA[4 * PAGE : 12 * PAGE]


@pytest.mark.parametrize("lead", [0, 8])
def test_little_more_than_a_mebibyte_is_asked_for_at_once(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, lead: int
) -> None:
    asked: list[int] = []
    preadv = os.preadv

    def noted(fd: int, buffers: Any, offset: int) -> int:
        asked.append(sum(map(len, buffers)))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    out = page_aligned(3 * SPARE, lead=lead)
    storage.read_uncached("f", 0, [out])
    assert out == DATA[: 3 * SPARE]
    assert len(asked) >= 3
    assert max(asked) <= SPARE + (64 << 10)


def test_what_lies_otherwise_is_copied_once(storage: LocalStorage) -> None:
    out = page_aligned(2 * SPARE, lead=8)
    assert storage.read_uncached("f", 1000, [out]) == 2 * SPARE
    assert out == DATA[1000 : 1000 + 2 * SPARE]


@pytest.mark.parametrize(
    ("offset", "lengths"),
    [
        (0, [1]), (511, [2]), (513, [1, 1, 0, 1]), (4095, [4097]), (100, [5000, 7, 70000, 1]), (SIZE - 1, [1]),
        (7, [PAGE] * 700), (SPARE - 3, [SPARE, 5, SPARE]), (0, [SIZE]), (SIZE - 5000, [3000, 2000]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("congruent", [True, False])
def test_any_range_fills_any_buffers(storage: LocalStorage, offset: int, lengths: list[int], congruent: bool) -> None:
    at, outs = offset, []
    for length in lengths:
        outs.append(page_aligned(length, lead=at % PAGE if congruent else 8))
        at += length
    assert storage.read_uncached("f", offset, outs) is not None
    assert b"".join(outs) == DATA[offset:at]
    assert (storage.counters.reads, storage.counters.bytes_read) == (1, at - offset)


def test_reads_that_come_short_go_on_where_they_ended(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:1024]], at))
    outs = [page_aligned(5000, lead=300), page_aligned(3000, lead=8)]
    storage.read_uncached("f", 300, outs)
    assert b"".join(outs) == DATA[300:8300]


def test_a_file_that_ends_inside_a_read_is_told_of(storage: LocalStorage) -> None:
    with pytest.raises(ReadError, match=r"wanted 2000 bytes at offset \d+, got 1000"):
        storage.read_uncached("f", SIZE - 1000, [page_aligned(2000)])


def test_an_error_of_the_disk_names_file_and_offset(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ReadError, match=r"^f .*: Input/output error, while reading at offset 512"):
        storage.read_uncached("f", 512, [page_aligned(512)])


def test_a_file_system_that_refuses_such_a_read_after_all_is_read_through_the_cache(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refused)
    assert storage.read_uncached("f", 512, [page_aligned(512)]) is None
    assert storage.uncached("f").why == "direct reads are refused"


def test_nothing_is_brought_into_the_page_cache(storage: LocalStorage) -> None:
    storage.read_uncached("f", 0, [page_aligned(SIZE)])
    assert storage.cached_share("f", 0, SIZE) == 0.0


def test_pages_that_are_absent_are_found_and_forgotten(storage: LocalStorage) -> None:
    storage.read_into("f", 2 * PAGE, page_aligned(3 * PAGE))
    absent = storage.absent_ranges("f", PAGE + 5, 6 * PAGE)
    if absent is None:
        pytest.skip("the system does not tell what its page cache holds")
    assert absent == [(PAGE, PAGE), (5 * PAGE, 3 * PAGE)]
    storage.forget("f", 2 * PAGE, 3 * PAGE)
    assert storage.absent_ranges("f", 0, SIZE) == [(0, -(-SIZE // PAGE) * PAGE)]


def test_what_is_cached_is_seen_without_the_call_for_it(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "_cached_pages", lambda *_: None)
    storage.read_into("f", 0, page_aligned(SIZE))
    assert storage.cached_share("f", 0, SIZE) == 1.0


def test_a_file_in_memory_has_no_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(DATA)
    monkeypatch.setattr(direct, "_alignments", lambda fd: (0, 0))
    monkeypatch.setattr(file_systems, "_magic", lambda fd: 0x01021994)
    with LocalStorage(tmp_path) as storage:
        assert storage.uncached("f") == (False, "tmpfs has no direct reads")
        assert storage.read_uncached("f", 0, [page_aligned(10)]) is None


def test_a_network_file_system_could_but_is_told_of(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "_magic", lambda fd: 0x6969)
    assert storage.uncached("f") == (True, "")  # it was looked at before
    storage.close()
    with LocalStorage(storage.uri) as again:
        assert again.uncached("f") == (True, "NFS")


def test_no_descriptor_is_left(storage: LocalStorage) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with LocalStorage(storage.uri) as other:
        other.read_uncached("f", 0, [page_aligned(PAGE)])
        other.absent_ranges("f", 0, SIZE)
        assert len(set(os.listdir("/proc/self/fd"))) == len(before) + 2
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_joined_storage_passes_on_and_says_what_its_parts_cannot(storage: LocalStorage) -> None:
    joined = JoinedStorage({"part": storage})
    out = page_aligned(PAGE)
    assert joined.uncached("part/f").possible
    assert joined.read_uncached("part/f", 0, [out]) == 0
    assert out == DATA[:PAGE]


def test_written_to_a_writable_mapping_stays_in_this_process(storage: LocalStorage) -> None:
    view = storage.map("f", writable=True)
    view[0] = 99
    assert (view[0], bytes(storage.map("f")[:4])) == (99, DATA[:4])
    assert Path(storage.uri, "f").read_bytes() == DATA


def test_a_handle_closes_both_of_its_descriptors(storage: LocalStorage) -> None:
    opened = handle.Handle("f", os.open(Path(storage.uri, "f"), os.O_RDONLY))
    found: DirectFile = opened.direct()
    opened.close()
    for fd in (opened.fd, found.fd):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_spare_buffers_are_taken_by_turns() -> None:
    spare = Spare()
    (first, one), (second, two), (third, three) = (spare.take() for _ in range(3))
    assert (len(first), len(second)) == (MOST, MOST)
    assert (address(first), address(second), address(third)) == (one, two, three)
    assert one == three
    assert min(one, two) % HUGE == 0  # a huge page, where the system has them
    assert abs(one - two) == MOST == HUGE // 2


def test_the_buffer_that_is_copied_from_is_not_the_next_one_to_be_read_into(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []
    read = os.preadv

    def watched(fd: int, buffers: list[memoryview], *rest: int) -> int:
        places.extend(address(buffer) for buffer in buffers)
        return read(fd, buffers, *rest)

    monkeypatch.setattr(os, "preadv", watched)
    for offset in (8, 16):
        storage.read_uncached("f", offset, [page_aligned(3 * SPARE, lead=0)])
    assert len(places) > 4
    assert len(set(places)) == 2
    assert all(a != b for a, b in pairwise(places))


@pytest.mark.parametrize(
    ("offset", "nbytes", "reads"),
    [(8, 2 * SPARE, 2), (8, SPARE + 1, 1), (0, 3 * SPARE, 3), (1000, 2 * SPARE + (80 << 10), 3), (8, 100, 1)],
)
def test_a_few_bytes_at_the_end_are_no_read_of_their_own(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, offset: int, nbytes: int, reads: int
) -> None:
    lengths: list[int] = []
    read = os.preadv

    def watched(fd: int, buffers: list[memoryview], *rest: int) -> int:
        lengths.append(sum(map(len, buffers)))
        return read(fd, buffers, *rest)

    monkeypatch.setattr(os, "preadv", watched)
    out = page_aligned(nbytes, lead=3)
    storage.read_uncached("f", offset, [out])
    assert out == DATA[offset : offset + nbytes]
    assert len(lengths) == reads
    assert max(lengths) <= MOST


def test_new_memory_has_its_pages_before_bytes_are_copied_there(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(direct, "touch_at", lambda at, length: lengths.append(length))
    out = page_aligned(2 * SPARE, lead=8)
    storage.read_uncached("f", 1000, [out])
    if touching.knows_populate():
        assert len(out) - 4096 <= sum(lengths) <= len(out)  # but for what a block at the end has of it
    lengths.clear()
    storage.read_uncached("f", 1000, [out])
    assert lengths == []
    assert out == DATA[1000 : 1000 + 2 * SPARE]


@pytest.mark.parametrize("lead", [0, 8, 504, 1000])
@pytest.mark.parametrize("offset", [8, 1000, 4096])
def test_where_a_disk_takes_any_address_bytes_go_straight_to_where_they_belong(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, lead: int
) -> None:
    read = os.preadv

    def lenient(fd: int, buffers: list[memoryview], at: int) -> int:
        """Read as a disk does that wants blocks of 512 bytes, and addresses that are multiples of 8."""
        lengths = [len(buffer) for buffer in buffers]
        assert at % 512 == 0
        assert all(n % 512 == 0 and address(buffer) % 8 == 0 for n, buffer in zip(lengths, buffers, strict=True))
        block = page_aligned(sum(lengths))
        got, done = read(fd, [block], at), 0
        for buffer in buffers:
            part = block[done : min(done + len(buffer), got)]
            buffer[: len(part)] = part
            done += len(part)
        return got

    monkeypatch.setattr(direct, "_alignments", lambda fd: (512, 8))
    monkeypatch.setattr(os, "preadv", lenient)
    out = page_aligned(2 * SPARE + 40, lead=lead)
    with LocalStorage(tmp_path) as opened:
        copied = opened.read_uncached("f", offset, [out])
    assert out == DATA[offset : offset + 2 * SPARE + 40]
    assert copied is not None
    assert copied < 1024  # the ends that are no whole blocks


@pytest.mark.parametrize(
    ("told", "expected"),
    [((4, 512), (512, 4)), ((512, 4096), (4096, 512)), ((4096, 512), (4096, 4096)), ((0, 0), (0, 0))],
)
def test_what_the_kernel_tells_of_alignment(
    told: tuple[int, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def statx(self, fd: int, path: bytes, flags: int, mask: int, out: Any) -> int:
            for at, value in ((0, mask), (152, told[0]), (156, told[1])):
                struct.pack_into("=I", out, at, value)
            return 0

    monkeypatch.setattr(direct, "libc", lambda *needed: Library())
    assert direct._alignments(0) == expected
