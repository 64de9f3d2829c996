"""Memory that nobody has touched gets its pages before a read; memory that is in use is left as it is."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tensorferry.errors import ReadError
from tensorferry.storage import touching
from tensorferry.storage.local import LocalStorage
from tensorferry.storage.touching import PIECE, in_touched_pieces

MIB = 1 << 20


def fresh(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def touched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the length of each piece that is touched."""
    lengths: list[int] = []
    monkeypatch.setattr(touching, "_touch", lambda view: lengths.append(len(view)))
    return lengths


needs_the_call = pytest.mark.skipif(not touching.knows_populate(), reason="the kernel cannot be asked for pages")


@needs_the_call
def test_untouched_memory_is_touched_piece_by_piece_each_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = touched(monkeypatch)
    pieces = in_touched_pieces(fresh(2 * PIECE + 5000))
    assert [(len(piece), sum(lengths)) for piece in pieces] == [
        (PIECE, PIECE), (PIECE, 2 * PIECE), (5000, 2 * PIECE + 5000)
    ]  # fmt: skip


def test_memory_in_use_is_not_touched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, view = touched(monkeypatch), fresh(3 * PIECE)
    view[:] = bytes(len(view))
    assert ([len(piece) for piece in in_touched_pieces(view)], lengths) == ([3 * PIECE], [])


def test_small_memory_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = touched(monkeypatch)
    assert ([len(piece) for piece in in_touched_pieces(fresh(PIECE - 1))], lengths) == ([PIECE - 1], [])


def test_where_the_kernel_cannot_be_asked_all_is_filled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touching, "knows_populate", lambda: False)
    assert [len(piece) for piece in in_touched_pieces(fresh(2 * PIECE))] == [2 * PIECE]


@needs_the_call
def test_touching_writes_nothing_and_reaches_all_pages_of_what_it_is_given() -> None:
    view = fresh(4 * PIECE)
    view[100] = 7
    pieces = list(in_touched_pieces(view[100:-100]))
    assert sum(map(len, pieces)) == 4 * PIECE - 200
    assert (view[100], any(view[101:])) == (7, False)
    assert not touching.is_untouched(view)


@pytest.mark.parametrize("sizes", [[3 * MIB + 7], [10, 2 * MIB, 10], [2 * MIB, 2 * MIB + 1]])
def test_reads_into_untouched_memory_bring_the_same_bytes_and_count_as_one(tmp_path: Path, sizes: list[int]) -> None:
    data = os.urandom(5 * MIB)
    (tmp_path / "f").write_bytes(data)
    outs = [fresh(size) for size in sizes]
    with LocalStorage(tmp_path) as storage:
        storage.read_vector("f", 11, outs)
        assert (storage.counters.reads, storage.counters.bytes_read) == (1, sum(sizes))
    assert b"".join(outs) == data[11 : 11 + sum(sizes)]


def test_files_that_end_inside_a_piece_are_refused_with_how_far_they_go(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(2 * MIB + 9))
    with (
        LocalStorage(tmp_path) as storage,
        pytest.raises(ReadError, match=rf"wanted {4 * MIB} bytes at offset 0, got {2 * MIB + 9}"),
    ):
        storage.read_vector("f", 0, [fresh(MIB), fresh(3 * MIB)])
