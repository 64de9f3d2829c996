"""What lies in the page cache, and would be staged, is copied once from where it lies; and a file that is changed
meanwhile harms nobody."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from helpers.checkpoints import raw
from helpers.core_values import columns as columns_of
from helpers.memory_storage import UncachedStorage
from helpers.reading_ways import is_leased
from tensorferry.core.boxes import Region
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.core.planning import make_plan
from tensorferry.core.schedule import Schedule
from tensorferry.core.target import TargetTensor
from tensorferry.core.transforms import Add, TensorSpec
from tensorferry.errors import ReadError
from tensorferry.execute import ThreadedExecutor, lending
from tensorferry.execute.exchange import Exchange
from tensorferry.execute.placing import landing
from tensorferry.storage.base import SupportsLease
from tensorferry.storage.local import LocalStorage

MIB = 1 << 20
F32, F64 = DTYPES["F32"], DTYPES["F64"]
ROWS, COLUMNS = 3000, 1024  # 4 KiB a row, 11.7 MiB
LONG = TensorEntry.at("long", F32, (1 << 21 | 1, 4), "f", 0)
WHOLE = Region.whole((ROWS, COLUMNS))


class Lending(UncachedStorage):
    """Files in a page cache; `lends` says whether the next range is lent."""

    cached = 1.0

    def __init__(self, content: bytes, lends: Sequence[bool] = (), why: str = "") -> None:
        super().__init__({"f": content})
        self.lent: list[tuple[int, int]] = []
        self._lends, self.why = list(lends), why

    @contextmanager
    def lend(self, path: str, offset: int, length: int) -> Iterator[memoryview | None]:
        if self._lends and not self._lends.pop(0):
            yield None
            return
        self.lent.append((offset, length))
        yield memoryview(bytearray(self.files[path][offset : offset + length]))


def matrix() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def scheduled(plan: Plan, max_read: int = 32 * MIB) -> Schedule:
    return lower(plan, max_gap=4096, max_read=max_read, max_staging=128 * MIB, waste=100.0)


def step(name: str, entry: TensorEntry, region: Region) -> Step:
    return Step(name, Region.whole(region.shape), (Source(entry, region),))


def columns(first: int, last: int, *, offset: int = 0, other: str = "") -> Plan:
    """Return the plan of taking some columns of the matrix, and the vector `other` that lies before it."""
    entry = TensorEntry.at("w", F32, (ROWS, COLUMNS), "f", offset)
    part = columns_of((ROWS, COLUMNS), first, last)
    steps, specs = [step("p", entry, part)], {"p": TensorSpec(F32, part.shape)}
    if other:
        vector = TensorEntry.at("v", F32, (offset // 4,), "f", 0)
        steps.append(step(other, vector, Region.whole(vector.shape)))
        specs[other] = TensorSpec(F32, vector.shape)
    return Plan(tuple(steps), specs)


def zeros(plan: Plan) -> dict[str, torch.Tensor]:
    dtypes = {F32: torch.float32, F64: torch.float64}
    return {name: torch.zeros(spec.shape, dtype=dtypes[spec.dtype]) for name, spec in plan.parameters.items()}


def test_it_is_tested_with_a_storage_that_lends() -> None:
    assert isinstance(Lending(b""), SupportsLease)


def test_columns_are_copied_from_where_they_lie_and_nothing_is_read_or_staged() -> None:
    schedule, storage = scheduled(columns(300, 364)), Lending(raw(matrix()))
    found = zeros(schedule.plan)
    counters = ThreadedExecutor(1).run(schedule, storage, found)
    assert torch.equal(found["p"], matrix()[:, 300:364])
    assert (storage.reads, storage.lent) == ([], [(1200, schedule.bytes_read)])
    assert counters.ways == {"cached: leased": schedule.bytes_read}
    assert (counters.bytes_read, counters.reads) == (schedule.bytes_read, schedule.reads)
    assert (counters.direct_bytes, counters.copied_bytes, counters.staging_peak) == (ROWS * 64 * 4, 0, 0)


def test_what_is_cast_is_lent_and_what_the_cast_spoils_is_counted() -> None:
    values = matrix()
    values[5, 7] = 1e30
    entry = TensorEntry.at("w", F32, (ROWS, COLUMNS), "f", 0)
    plan = make_plan(
        Catalogue([entry], format="memory"), {"w": TargetTensor.plain("w", DTYPES["F16"], (ROWS, COLUMNS))}
    )
    found = {"w": torch.zeros(ROWS, COLUMNS, dtype=torch.float16)}
    counters = ThreadedExecutor(1).run(scheduled(plan), Lending(raw(values)), found)
    assert torch.equal(found["w"], values.half())
    assert counters.ways == {"cached: leased": values.nbytes}
    assert counters.losses["w"].overflow > 0


def test_what_goes_straight_to_its_place_is_read() -> None:
    plan = columns(0, COLUMNS)
    storage, found = Lending(raw(matrix())), zeros(plan)
    counters = ThreadedExecutor(1).run(scheduled(plan), storage, found)
    assert torch.equal(found["p"], matrix())
    assert (storage.lent, counters.ways) == ([], {"cached": matrix().nbytes})


def test_a_read_that_brings_several_things_is_lent_for_all_of_them() -> None:
    plan, vector = columns(0, 512, offset=800, other="q"), torch.arange(200.0)
    storage, found = Lending(raw(vector) + raw(matrix())), zeros(plan)
    counters = ThreadedExecutor(1).run(scheduled(plan), storage, found)
    assert torch.equal(found["p"], matrix()[:, :512])
    assert torch.equal(found["q"], vector)
    assert (counters.reads, len(storage.lent), storage.reads) == (1, 1, [])
    assert counters.direct_bytes == 800 + ROWS * 512 * 4


@pytest.mark.parametrize("lends", [[False] * 9, [True, False, True], [False, True]])
def test_what_is_not_lent_is_read_and_each_byte_is_counted_once(lends: list[bool]) -> None:
    plan = columns(0, 512, offset=800, other="q")
    schedule = scheduled(plan, max_read=MIB)
    storage, found = Lending(raw(torch.arange(200.0)) + raw(matrix()), lends), zeros(plan)
    counters = ThreadedExecutor(2).run(schedule, storage, found)
    assert torch.equal(found["p"], matrix()[:, :512])
    assert torch.equal(found["q"], torch.arange(200.0))
    assert (counters.bytes_read, counters.reads) == (schedule.bytes_read, schedule.reads)
    assert sum(counters.ways.values()) == schedule.bytes_read
    assert sum(n for _, n in storage.lent) == counters.ways.get("cached: leased", 0)
    assert sum(n for _, _, n in storage.reads) == schedule.bytes_read - sum(n for _, n in storage.lent)


def test_reads_of_a_batch_that_are_lent_leave_the_others_as_they_were() -> None:
    entries = [TensorEntry.at(name, F32, (300, COLUMNS), "f", n * 2 * MIB) for n, name in enumerate("abc")]
    part = columns_of((300, COLUMNS), 256, 512)
    steps = tuple(step(e.name, e, Region.whole(e.shape) if e.name == "b" else part) for e in entries)
    plan = Plan(steps, {s.parameter: TensorSpec(F32, s.into.shape) for s in steps})
    schedule = scheduled(plan)
    assert [len(batch.reads) for batch in schedule.batches] == [3]
    content = torch.arange(6 * MIB // 4, dtype=torch.float32)
    storage, found = Lending(raw(content), [False, True]), zeros(plan)
    counters = ThreadedExecutor(1).run(schedule, storage, found)
    for n, entry in enumerate(entries):
        whole = content[n * MIB // 2 :][: 300 * COLUMNS].view(300, COLUMNS)
        assert torch.equal(found[entry.name], whole if entry.name == "b" else whole[:, 256:512])
    assert (len(storage.lent), len(storage.reads)) == (1, 2)
    assert (counters.bytes_read, counters.reads) == (schedule.bytes_read, 3)


def test_what_is_computed_is_read() -> None:
    entry, region = TensorEntry.at("w", F32, (ROWS, COLUMNS), "f", 0), WHOLE
    plan = Plan((Step("p", region, (Source(entry, region),), via=Add(1), window=region),), {
        "p": TensorSpec(F32, (ROWS, COLUMNS))
    })  # fmt: skip
    storage, found = Lending(raw(matrix())), zeros(plan)
    ThreadedExecutor(1).run(scheduled(plan), storage, found)
    assert torch.equal(found["p"], matrix() + 1)
    assert storage.lent == []


@pytest.mark.parametrize(
    ("offset", "options", "why"),
    [(2, {}, ""), (0, {"direct": "never"}, ""), (0, {"direct": "always"}, ""), (0, {}, "NFS")],
)
def test_odd_addresses_other_ways_and_other_file_systems_are_read(
    offset: int, options: dict[str, Any], why: str
) -> None:
    storage = Lending(bytes(offset) + raw(matrix()), why=why)
    plan = columns(0, 512, offset=offset)
    found = zeros(plan)
    counters = ThreadedExecutor(1, **options).run(scheduled(plan), storage, found)
    assert torch.equal(found["p"], matrix()[:, :512])
    assert storage.lent == []
    assert "cached: leased" not in counters.ways


def test_nothing_is_lent_where_others_wait_for_what_this_rank_reads() -> None:
    class Cold(Lending):
        def cached_share(self, path: str, offset: int, length: int) -> float:
            return 0.0

    class Others:
        rank, nbytes = 0, 0

        def shared(self, rows: Any) -> None:
            return None

    plan, others = columns(0, 512), cast("Exchange", Others())
    storage, found = Cold(raw(matrix())), zeros(plan)
    ThreadedExecutor(1, exchange=others).run(scheduled(plan), storage, found)
    assert torch.equal(found["p"], matrix()[:, :512])
    assert storage.lent == []


def test_a_long_read_would_have_a_writer_wait_too_long() -> None:
    plan = Plan((step("p", LONG, columns_of(LONG.shape, 0, 2)),), {"p": TensorSpec(F32, (LONG.shape[0], 2))})
    storage, found = Lending(bytes(LONG.shape[0] * 16)), zeros(plan)
    assert scheduled(plan, 64 * MIB).batches[0].reads[0].length > 32 * MIB
    ThreadedExecutor(1).run(scheduled(plan, 64 * MIB), storage, found)
    assert storage.lent == []


def test_small_reads_are_not_worth_it() -> None:
    entry = TensorEntry.at("w", F32, (60, COLUMNS), "f", 0)  # under 256 KiB
    part = columns_of((60, COLUMNS), 0, 512)
    plan = Plan((step("p", entry, part),), {"p": TensorSpec(F32, part.shape)})
    storage, found = Lending(raw(matrix()[:60])), zeros(plan)
    ThreadedExecutor(1).run(scheduled(plan), storage, found)
    assert torch.equal(found["p"], matrix()[:60, :512])
    assert storage.lent == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(raw(matrix()))
    with LocalStorage(tmp_path) as storage:
        if why := storage.uncached("f").why:
            pytest.skip(f"temporary files lie on {why}")
        with storage.lend("f", 0, MIB) as view:
            if view is None:
                pytest.skip("temporary files cannot be leased")
    return tmp_path


def test_files_are_leased_no_longer_than_their_load_lasts(folder: Path) -> None:
    plan = columns(0, 512)
    found = zeros(plan)
    with LocalStorage(folder) as storage:
        counters = ThreadedExecutor(2).run(scheduled(plan, MIB), storage, found)
        assert not is_leased(folder / "f")
    assert torch.equal(found["p"], matrix()[:, :512])
    assert counters.ways == {"cached: leased": counters.bytes_read}
    assert str(folder / "f") not in Path("/proc/self/maps").read_text()


def test_numbers_behind_bytes_at_an_odd_place_are_copied_once_as_well(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte = TensorEntry.at("b", DTYPES["U8"], (5,), "odd", 3)
    entry, part = TensorEntry.at("w", F32, (ROWS, COLUMNS), "odd", 8), columns_of((ROWS, COLUMNS), 0, 512)
    plan = Plan(
        (step("q", byte, Region.whole((5,))), step("p", entry, part)),
        {"q": TensorSpec(DTYPES["U8"], (5,)), "p": TensorSpec(F32, part.shape)},
    )
    (tmp_path / "odd").write_bytes(bytes(range(8)) + raw(matrix()))
    found = {"p": torch.zeros(part.shape), "q": torch.zeros(5, dtype=torch.uint8)}

    def fail(*given: Any) -> Any:
        raise AssertionError("all of it was copied first")

    with LocalStorage(tmp_path) as storage, monkeypatch.context() as during:
        during.setattr(torch.Tensor, "clone", fail)
        counters = ThreadedExecutor(1).run(scheduled(plan), storage, found)
    assert torch.equal(found["p"], matrix()[:, :512])
    assert found["q"].tolist() == [3, 4, 5, 6, 7]
    assert counters.ways == {"cached: leased": counters.bytes_read}


def test_a_copy_that_fails_gives_the_lease_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(lending, "landing", fail)
    with LocalStorage(folder) as storage:
        with pytest.raises(MemoryError):
            ThreadedExecutor(2).run(scheduled(columns(0, 512), MIB), storage, zeros(columns(0, 512)))
        assert not is_leased(folder / "f")


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("open(path, 'r+b')", None),
        ("open(path, 'r+b').write(b'other')", "it was written to"),
        ("os.truncate(path, 5)", "ends inside a read"),
        ("open(path, 'wb')", "ends inside a read"),
    ],
)
def test_a_writer_waits_for_one_copy_and_the_load_ends_well_or_says_what_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, changed: str | None
) -> None:
    plan, writers = columns(0, 512), list[subprocess.Popen[bytes]]()
    found = zeros(plan)

    def with_a_writer(*given: Any) -> Any:
        """Have a writer wait for the first copy; the load goes on when it has ended."""
        if writers:
            assert writers[0].wait(20) == 0
        else:
            program = f"import os; path = {str(folder / 'f')!r}; {code}"
            writers.append(subprocess.Popen([sys.executable, "-c", program]))
            while lends(storage):
                time.sleep(0.01)
            assert writers[0].poll() is None
        return landing(*given)

    with LocalStorage(folder) as storage:
        read = storage.read_vector

        def read_after_the_writer(*given: Any) -> None:
            assert writers[0].wait(20) == 0
            read(*given)

        monkeypatch.setattr(lending, "landing", with_a_writer)
        monkeypatch.setattr(storage, "read_vector", read_after_the_writer)
        with pytest.raises(ReadError, match=changed) if changed else nullcontext():
            run_and_check(scheduled(plan, MIB), storage, found)
    assert writers[0].wait(20) == 0
    if not changed:
        assert torch.equal(found["p"], matrix()[:, :512])


def run_and_check(schedule: Schedule, storage: LocalStorage, found: dict[str, torch.Tensor]) -> None:
    ThreadedExecutor(1).run(schedule, storage, found)
    storage.check_unchanged()


def lends(storage: LocalStorage) -> bool:
    with storage.lend("f", 0, 10) as view:
        return view is not None
