"""What is read ahead of headers: short ranges together, the last bytes of each object, and no more than that."""

from __future__ import annotations

from tensorferry.storage.object_blocks import AHEAD, MOST_AHEAD, Block, Blocks, fetched, together

MIB = 1 << 20


def test_ranges_near_each_other_are_one_and_none_goes_past_the_end() -> None:
    assert list(together([(-24, 100), (300, 100)], 10**6)) == [(0, 400)]
    assert list(together([(5 * MIB, 10), (0, 10)], 10 * MIB)) == [(0, 10), (5 * MIB, 10)]
    assert list(together([(90, 100), (200, 5)], 120)) == [(90, 30)]
    assert list(together([], 10)) == list(together([(0, 0)], 10)) == []


def test_ranges_that_are_one_are_cut_so_that_each_is_whole_in_one_of_them() -> None:
    ranges = [(at, 1000) for at in range(0, 20 * MIB, 200_000)]
    found = list(together(ranges, 20 * MIB))
    assert max(length for _, length in found) <= 8 * MIB
    assert all(any(a <= at and at + n <= a + length for a, length in found) for at, n in ranges)


def test_many_megabytes_are_not_brought() -> None:
    ranges = [(at, MIB) for at in range(0, 400 * MIB, MIB)]
    assert sum(length for _, length in together(ranges, 400 * MIB)) <= 64 * MIB


def test_a_read_that_goes_on_at_the_last_gets_more_ahead() -> None:
    blocks = Blocks()
    assert blocks.ahead("a", 0) == AHEAD
    blocks.keep("a", Block(0, bytes(AHEAD)))
    assert (blocks.ahead("a", AHEAD), blocks.ahead("a", 5 * MIB), blocks.ahead("b", AHEAD)) == (2 * AHEAD, AHEAD, AHEAD)
    blocks.keep("a", Block(0, bytes(MOST_AHEAD)))
    assert blocks.ahead("a", 100) == MOST_AHEAD


def test_what_is_kept_is_found_and_what_is_not_whole_is_not() -> None:
    blocks = Blocks()
    blocks.bring("a", [Block(100, b"0123456789"), Block(10, b"abc")])
    blocks.keep("a", Block(50, b"last"))
    assert bytes(blocks.find("a", 103, 4) or b"") == b"3456"
    assert bytes(blocks.find("a", 10, 3) or b"") == b"abc"
    assert bytes(blocks.find("a", 51, 2) or b"") == b"as"
    assert [blocks.find("a", *one) for one in ((9, 2), (12, 2), (108, 3), (0, 1))] == [None] * 4
    assert blocks.find("b", 100, 1) is None
    blocks.clear()
    assert blocks.find("a", 100, 1) is None


def test_few_objects_are_kept() -> None:
    blocks = Blocks()
    for n in range(100):
        blocks.keep(str(n), Block(0, b"x"))
    assert sum(blocks.find(str(n), 0, 1) is not None for n in range(100)) == 64


def test_a_range_that_cannot_be_read_is_left_to_whoever_asks_for_it() -> None:
    def read(offset: int, length: int) -> bytes:
        if offset == 7:
            raise OSError
        return bytes(length)

    assert sorted(fetched(read, [(0, 2), (7, 1), (9, 1)], 2)) == [Block(0, b"\0\0"), Block(9, b"\0")]
