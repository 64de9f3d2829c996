from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from tensorferry.storage.blocks import HUGE, block_of
from tensorferry.storage.libc import address


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE - 1])
def test_a_small_block_begins_on_a_page(nbytes: int) -> None:
    block = block_of(nbytes)
    assert len(block) == nbytes
    assert address(block) % mmap.PAGESIZE == 0
    block[-1] = 7
    assert bytes(block[: nbytes - 1]) == bytes(nbytes - 1)


@pytest.mark.parametrize("nbytes", [HUGE, HUGE + 1, 3 * HUGE + 4096])
def test_a_large_block_begins_on_a_huge_page_and_is_writable_to_its_last_byte(nbytes: int) -> None:
    block = block_of(nbytes)
    assert len(block) == nbytes
    assert address(block) % HUGE == 0
    block[:1] = block[-1:] = b"x"
    assert (block[0], block[-1]) == (120, 120)


def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    block = block_of(HUGE)
    block[-1] = 1
    assert "hg" not in mapping_at(address(block))


def test_a_kernel_that_refuses_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *given: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    block = block_of(HUGE)
    block[-1] = 1
    assert "hg" not in mapping_at(address(block))


def test_blocks_go_back_to_the_system_with_their_last_view() -> None:
    block = block_of(64 * HUGE)
    at = address(block) + 32 * HUGE
    part = block[HUGE:]
    del block
    assert mapping_at(at)
    del part
    assert not mapping_at(at)


ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this system has no huge pages")
def test_the_system_is_asked_for_huge_pages() -> None:
    block = block_of(4 * HUGE)
    assert "hg" in mapping_at(address(block))
    assert "hg" in mapping_at(address(block) + 4 * HUGE - 1)


@pytest.mark.skipif(not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this system has no huge pages")
def test_an_end_that_fills_no_huge_page_takes_none() -> None:
    block = block_of(3 * HUGE + 4096)
    assert "hg" in mapping_at(address(block) + 3 * HUGE - 1)
    assert "hg" not in mapping_at(address(block) + 3 * HUGE)


def mapping_at(place: int) -> list[str]:
    """Return the flags of the mapping that has an address; none where there is no mapping."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, is_range, last = line.partition(" ")[0].partition("-")
        if is_range:
            inside = int(first, 16) <= place < int(last, 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []
