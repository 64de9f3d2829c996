"""Which way bytes come: past the page cache or through it, and what the page cache holds afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch

from helpers.checkpoints import raw
from helpers.core_values import columns as columns_of
from helpers.core_values import entry as entry_of
from helpers.memory_storage import MemoryStorage
from tensorferry.config import Direct, ReadOptions
from tensorferry.core.boxes import Region
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.core.planning import make_plan
from tensorferry.core.schedule import Read
from tensorferry.core.target import TargetTensor
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import ConfigError
from tensorferry.execute import ThreadedExecutor
from tensorferry.execute.base import Counters
from tensorferry.execute.ways import Ways, reads_in_part
from tensorferry.storage.base import SupportsUncached, Uncached

MIB = 1 << 20
LOCAL = Uncached(True, "")
DATA = bytes(range(256)) * (2 * MIB // 256)


@dataclass
class CachedStorage(MemoryStorage):
    """Files in memory behind a page cache that a test fills, and that reads fill."""

    found: Uncached = LOCAL
    share: float = 0.0
    refuses: bool = False
    absent: Sequence[tuple[int, int]] | None = ((4096, 8192),)
    forgotten: list[tuple[int, int]] = field(default_factory=list)
    past: int = 0

    def __post_init__(self) -> None:
        super().__init__({"f": DATA})

    def uncached(self, path: str) -> Uncached:
        return self.found

    def cached_share(self, path: str, offset: int, length: int) -> float:
        return self.share

    def read_uncached(self, path: str, offset: int, outs: Sequence[memoryview]) -> int | None:
        if self.refuses:
            return None
        self.past += 1
        for out in outs:
            out[:] = self.files[path][offset : offset + len(out)]
            offset += len(out)
        return 7

    def absent_ranges(self, path: str, offset: int, length: int) -> Sequence[tuple[int, int]] | None:
        return self.absent

    def forget(self, path: str, offset: int, length: int) -> None:
        self.forgotten.append((offset, length))


def read(ways: Ways, *, length: int = MIB, buffers: int = 1) -> Counters:
    counters = Counters()
    outs = [memoryview(bytearray(length // buffers)) for _ in range(buffers)]
    ways.read("f", 512, outs, counters)
    assert b"".join(outs) == DATA[512 : 512 + length]
    return counters


def test_it_is_tested_with_a_storage_behind_a_cache() -> None:
    assert isinstance(CachedStorage(), SupportsUncached)


def test_cold_bytes_of_a_local_disk_are_read_past_the_cache() -> None:
    counters = read(Ways(CachedStorage()))
    assert (counters.ways, counters.copied_bytes) == ({"direct": MIB}, 7)


def test_what_is_cached_is_read_from_there() -> None:
    storage = CachedStorage(share=0.5)
    assert read(Ways(storage)).ways == {"cached": MIB}
    assert storage.past == 0


def test_where_direct_reads_do_not_pay_the_reason_is_told() -> None:
    assert read(Ways(CachedStorage(Uncached(True, "NFS")))).ways == {"buffered: NFS": MIB}
    assert read(Ways(CachedStorage(Uncached(False, "tmpfs has no direct reads")))).ways == {
        "buffered: tmpfs has no direct reads": MIB
    }


def test_small_reads_and_reads_into_many_small_buffers_go_through_the_cache() -> None:
    assert read(Ways(CachedStorage()), length=4096).ways == {"buffered: small": 4096}
    assert read(Ways(CachedStorage()), buffers=128).ways == {"buffered: small": MIB}


def test_a_file_system_that_refuses_after_all_is_read_through_the_cache() -> None:
    counters = read(Ways(CachedStorage(refuses=True)))
    assert (counters.ways, counters.copied_bytes) == ({"buffered: refused": MIB}, 0)


def test_never_and_always_do_not_look() -> None:
    assert read(Ways(CachedStorage(), "never")).ways == {"buffered": MIB}
    assert read(Ways(CachedStorage(Uncached(True, "NFS"), share=1.0), "always"), length=4096).ways == {"direct": 4096}


def test_a_storage_that_knows_nothing_of_a_cache_is_simply_read() -> None:
    storage = MemoryStorage({"f": DATA})
    assert read(Ways(storage, "auto", keep_cache=False)).ways == {"buffered": MIB}
    Ways(storage).refuse_impossible(["f"])


def test_always_is_refused_where_it_is_impossible() -> None:
    for storage, why in (
        (CachedStorage(Uncached(False, "tmpfs has no direct reads")), "tmpfs has no direct reads"),
        (MemoryStorage({"f": DATA}), "its storage knows no such reads"),
    ):
        with pytest.raises(ConfigError, match=f"direct 'always': f cannot be read past the page cache: {why}"):
            Ways(storage, "always").refuse_impossible(["f"])


@pytest.mark.parametrize("direct", get_args(Direct))
def test_what_a_read_brought_into_the_cache_is_forgotten_and_no_more(direct: Direct) -> None:
    storage = CachedStorage(share=1.0)
    read(Ways(storage, direct, keep_cache=False))
    assert storage.forgotten == ([] if direct == "always" else [(4096, 8192)])


def test_the_cache_stays_as_it_is_where_nobody_tells_what_was_there() -> None:
    storage = CachedStorage(share=1.0, absent=None)
    read(Ways(storage, "auto", keep_cache=False))
    assert storage.forgotten == []


def test_runs_at_equal_distances_go_through_the_cache_and_leave_no_trace() -> None:
    storage, counters, out = CachedStorage(), Counters(), memoryview(bytearray(30))
    Ways(storage, keep_cache=False).read_runs("f", 5, 100, 10, out, counters)
    assert bytes(out) == DATA[5:15] + DATA[105:115] + DATA[205:215]
    assert counters.ways == {"buffered: short runs": 30}
    assert storage.forgotten == [(4096, 8192)]


def test_what_other_ranks_read_too_goes_through_the_cache_that_they_share() -> None:
    def shared(ways: Ways) -> Counters:
        counters = Counters()
        ways.read("f", 0, [memoryview(bytearray(MIB))], counters, in_part=True)
        return counters

    assert shared(Ways(CachedStorage(), shared=True)).ways == {"buffered: shared": MIB}
    assert shared(Ways(CachedStorage(share=1.0), shared=True)).ways == {"cached": MIB}
    assert shared(Ways(CachedStorage(), "always", shared=True)).ways == {"direct": MIB}
    assert shared(Ways(CachedStorage(), keep_cache=False, shared=True)).ways == {"direct": MIB}
    assert shared(Ways(CachedStorage())).ways == {"direct": MIB}


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [(None, None, False), (None, "1", False), (None, "2", True), (False, "2", False), (True, None, True)],
)
def test_ranks_that_torchrun_starts_share_files(
    given: bool | None, ranks: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert ThreadedExecutor.of(ReadOptions(shared=given)).shared is expected


def test_a_rank_that_has_its_turn_shares_files_unless_it_is_alone() -> None:
    assert ReadOptions(turn=(1, 2)).is_shared
    assert not ReadOptions(turn=(0, 1)).is_shared


@pytest.mark.parametrize(("columns", "expected"), [(4, {0}), (7, set())])
def test_a_read_is_shared_where_a_good_part_of_it_is_not_needed(columns: int, expected: set[int]) -> None:
    entry, part = entry_of("w", (4, 8)), columns_of((4, 8), 0, columns)
    step = Step("w", Region.whole(part.shape), (Source(entry, part),))
    plan = Plan((step,), {"w": TensorSpec(entry.dtype, part.shape)})
    (batch,) = lower(plan, max_gap=64, max_read=MIB, max_staging=MIB, waste=4.0).batches
    assert len(batch.reads) == 1
    assert reads_in_part(plan, batch) == expected


@pytest.mark.parametrize(
    ("share", "direct", "cached"), [(1.0, "auto", True), (0.2, "auto", False), (1.0, "always", False)]
)
def test_a_load_of_cached_files_is_told_from_one_that_waits_for_a_disk(
    share: float, direct: Direct, cached: bool
) -> None:
    reads = [Read("f", n * MIB, MIB) for n in range(2)]
    ways = Ways(CachedStorage(share=share), direct)
    assert (ways.find_cached(reads), ways.find_cached([])) == (cached, False)


def test_of_many_reads_eight_are_looked_at() -> None:
    storage, looked = CachedStorage(), []
    storage.cached_share = lambda *where: looked.append(where) or 1.0  # type: ignore[method-assign, func-returns-value]
    assert Ways(storage).find_cached([Read("f", n, 1) for n in range(1001)])
    assert [at for _, at, _ in looked] == list(range(0, 1001, 126))


@pytest.mark.parametrize(
    ("given", "rank", "expected"),
    [
        ({}, None, (0, 1)),
        ({}, "1", (1, 4)),
        ({}, "4", (0, 1)),
        ({}, "one", (0, 4)),
        ({}, "1" * 5000, (0, 4)),
        ({"turn": [2, 3]}, "1", (2, 3)),
        ({"shared": True, "turn": (2, 3)}, None, (2, 3)),
        ({"shared": True}, None, (0, 1)),
        ({"turn": (2, 3)}, None, (2, 3)),
        ({"shared": False}, "1", (0, 1)),
    ],
)
def test_ranks_that_share_files_take_turns(
    given: dict[str, Any], rank: str | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert ThreadedExecutor.of(ReadOptions(**given)).turn == expected


@pytest.mark.parametrize(("turn", "first"), [(0, 0), (1, 2), (2, 4)])
def test_each_of_several_ranks_begins_elsewhere_and_reads_everything(turn: int, first: int) -> None:
    entries = [TensorEntry.at(f"w{n}", DTYPES["F32"], (4,), "f", 16 * n) for n in range(6)]
    plan = make_plan(
        Catalogue(entries, format="memory"), {e.name: TargetTensor.plain(e.name, DTYPES["F32"], (4,)) for e in entries}
    )
    schedule = lower(plan, max_gap=0, max_read=16, max_staging=16, waste=1.0)
    assert len(schedule.batches) == 6
    storage = MemoryStorage({"f": raw(torch.arange(24.0))})
    found = {e.name: torch.zeros(4) for e in entries}
    ThreadedExecutor(1, turn=(turn, 3)).run(schedule, storage, found)
    assert [at // 16 for _, at, _ in storage.reads] == [(first + n) % 6 for n in range(6)]
    assert torch.equal(torch.cat(list(found.values())), torch.arange(24.0))


@pytest.mark.parametrize(
    ("cores", "ranks", "readers", "copiers"), [(2, 1, 8, 2), (2, 2, 4, 1), (2, 8, 2, 1), (64, 8, 8, 8)]
)
def test_ranks_that_share_files_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, readers: int, copiers: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    options = ReadOptions(turn=(ranks - 1, ranks))
    assert (options.workers, options.copiers) == (readers, copiers)
    assert ReadOptions(threads=5, turn=(0, ranks)).workers == 5


@pytest.mark.parametrize("otherwise", [{"shared": False}, {"exchange": False}, {"direct": "never"}, {"mapped": True}])
def test_ranks_hand_on_what_they_read_unless_they_are_told_otherwise(otherwise: dict[str, Any]) -> None:
    assert ReadOptions(shared=True).hands_on
    assert not ReadOptions(**{"shared": True, **otherwise}).hands_on
