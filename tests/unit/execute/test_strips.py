"""Long reads that are copied on are read and placed a strip at a time, each byte once, through one small block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.checkpoints import raw
from helpers.memory_storage import MemoryStorage, UncachedStorage
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, Chunk, Span, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.core.planning import make_plan
from tensorferry.core.schedule import Schedule
from tensorferry.core.target import TargetTensor
from tensorferry.core.transforms import Add, TensorSpec
from tensorferry.execute import ThreadedExecutor
from tensorferry.execute.strips import Part, parts_of, strips

MIB = 1 << 20
F32, F64 = DTYPES["F32"], DTYPES["F64"]
ROWS, COLUMNS = 3000, 1024  # 4 KiB a row, 11.7 MiB


def scheduled(plan: Plan) -> Schedule:
    return lower(plan, max_gap=4096, max_read=32 * MIB, max_staging=128 * MIB, waste=100.0)


def columns(first: int, count: int, offset: int = 0) -> Plan:
    """Return the plan of taking some columns of the matrix."""
    entry = TensorEntry.at("w", F32, (ROWS, COLUMNS), "f", offset)
    region = Region((ROWS, COLUMNS), Box((0, first), (ROWS, first + count)))
    step = Step("p", Region.whole((ROWS, count)), (Source(entry, region),))
    return Plan((step,), {"p": TensorSpec(F32, (ROWS, count))})


def matrix() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


@pytest.mark.parametrize("offset", [0, 12])
def test_columns_are_taken_out_of_strips_that_bring_each_byte_once(offset: int) -> None:
    schedule = scheduled(columns(300, 64, offset))
    storage = MemoryStorage({"f": bytes(offset) + raw(matrix())})
    found = {"p": torch.zeros(ROWS, 64)}
    counters = ThreadedExecutor(1).run(schedule, storage, found)
    assert torch.equal(found["p"], matrix()[:, 300:364])
    assert counters.bytes_read == counters.copied_bytes == schedule.bytes_read
    assert (counters.reads, len(storage.reads)) == (schedule.reads, 3)
    assert [at for _, at, _ in storage.reads] == [offset + 300 * 4 + n * 1000 * 4096 for n in range(3)]


def test_no_more_than_a_strip_is_staged() -> None:
    storage, found = MemoryStorage({"f": raw(matrix())}), {"p": torch.zeros(ROWS, 64)}
    counters = ThreadedExecutor(1).run(scheduled(columns(0, 64)), storage, found)
    assert counters.staging_peak == 1001 * 4096  # which begins anywhere in a page


def test_what_is_cast_goes_through_strips_too() -> None:
    entry = TensorEntry.at("w", F32, (ROWS * COLUMNS,), "f", 0)
    plan = make_plan(Catalogue([entry], format="memory"), {"w": TargetTensor.plain("w", F64, (ROWS * COLUMNS,))})
    storage, found = MemoryStorage({"f": raw(matrix())}), {"w": torch.zeros(ROWS * COLUMNS, dtype=torch.float64)}
    counters = ThreadedExecutor(1).run(scheduled(plan), storage, found)
    assert torch.equal(found["w"], matrix().flatten().double())
    assert (len(storage.reads), counters.bytes_read) == (3, ROWS * COLUMNS * 4)


def test_what_goes_straight_to_its_place_is_one_read() -> None:
    entry = TensorEntry.at("w", F32, (ROWS, COLUMNS), "f", 0)
    plan = make_plan(Catalogue([entry], format="memory"), {"w": TargetTensor.plain("w", F32, (ROWS, COLUMNS))})
    storage = MemoryStorage({"f": raw(matrix())})
    counters = ThreadedExecutor(1).run(scheduled(plan), storage, {"w": torch.zeros(ROWS, COLUMNS)})
    assert (counters.copied_bytes, len(storage.reads)) == (0, 1)


def test_a_read_that_two_tasks_share_the_rows_of_is_read_as_a_whole() -> None:
    one, other = columns(0, 64), columns(64, 64)
    plan = Plan(
        (*one.steps, other.steps[0]._replace(parameter="q")), {"p": one.parameters["p"], "q": other.parameters["p"]}
    )
    schedule = scheduled(plan)
    batch = schedule.batches[0]
    assert (len(batch.reads), parts_of(plan, batch)) == (1, {})
    found = {"p": torch.zeros(ROWS, 64), "q": torch.zeros(ROWS, 64)}
    ThreadedExecutor(1).run(schedule, MemoryStorage({"f": raw(matrix())}), found)
    assert torch.equal(found["q"], matrix()[:, 64:128])


def test_a_read_of_several_tensors_is_done_in_strips_of_each() -> None:
    plan = columns(1000, 24, offset=4096)
    norm = TensorEntry.at("n", F32, (COLUMNS,), "f", 0)
    step = Step("n", Region.whole((COLUMNS,)), (Source(norm, Region.whole((COLUMNS,))),))
    plan = Plan((step, *plan.steps), {**plan.parameters, "n": TensorSpec(F32, (COLUMNS,))})
    schedule = scheduled(plan)
    (batch,) = schedule.batches
    length = (ROWS - 1) * 4096 + 24 * 4
    assert len(batch.reads) == 1
    assert parts_of(plan, batch) == {0: (Part(0, 0, 4096), Part(1, 4096 + 4000, length))}
    storage = MemoryStorage({"f": raw(torch.arange(COLUMNS, dtype=torch.float32)) + raw(matrix())})
    found = {"p": torch.zeros(ROWS, 24), "n": torch.zeros(COLUMNS)}
    counters = ThreadedExecutor(1).run(schedule, storage, found)
    assert torch.equal(found["p"], matrix()[:, 1000:])
    assert torch.equal(found["n"], torch.arange(COLUMNS, dtype=torch.float32))
    assert counters.bytes_read == 4096 + length  # and not what lies between them
    assert counters.staging_peak == 1001 * 4096


def test_a_read_that_something_is_computed_of_is_read_as_a_whole() -> None:
    plan = columns(1000, 24, offset=4096)
    norm = TensorEntry.at("n", F32, (COLUMNS,), "f", 0)
    whole = Region.whole((COLUMNS,))
    step = Step("n", whole, (Source(norm, whole),), via=Add(1), window=whole)
    plan = Plan((step, *plan.steps), {**plan.parameters, "n": TensorSpec(F32, (COLUMNS,))})
    (batch,) = scheduled(plan).batches
    assert (len(batch.reads), parts_of(plan, batch)) == (1, {})


def test_many_small_tensors_are_not_read_one_by_one() -> None:
    entries = [TensorEntry.at(f"{n}", F32, (16384,), "f", n * 65536) for n in range(100)]
    targets = {e.name: TargetTensor.plain(e.name, F64, e.shape) for e in entries}
    plan = make_plan(Catalogue(entries, format="memory"), targets)
    (batch,) = scheduled(plan).batches
    assert (len(batch.reads), batch.length) == (1, 6553600)
    assert not parts_of(plan, batch)


def test_a_transposed_tensor_is_cut_as_it_lies() -> None:
    chunk = Chunk(None, Span("f", 0, ROWS * COLUMNS * 4), (1, COLUMNS))
    entry = TensorEntry("w", F32, (COLUMNS, ROWS), (chunk,))
    step = Step("p", Region.whole((COLUMNS, ROWS)), (Source(entry, Region.whole((COLUMNS, ROWS))),))
    plan, found = Plan((step,), {"p": TensorSpec(F32, (COLUMNS, ROWS))}), {"p": torch.zeros(COLUMNS, ROWS)}
    counters = ThreadedExecutor(1).run(scheduled(plan), MemoryStorage({"f": raw(matrix())}), found)
    assert torch.equal(found["p"], matrix().T)
    assert counters.bytes_read == ROWS * COLUMNS * 4


def test_strips_are_of_about_equal_size_and_the_last_ends_with_the_last_needed_byte() -> None:
    plan = columns(1000, 16)
    batch = scheduled(plan).batches[0]
    ((n, (part,)),) = parts_of(plan, batch).items()
    parts = list(strips(plan, batch.tasks[part.task], part))
    assert [part.length for part in parts] == [1000 * 4096] * 2 + [999 * 4096 + 64]
    assert sum(part.length for part in parts) == batch.reads[n].length


def test_where_each_request_takes_long_there_are_no_strips() -> None:
    class FarAway(MemoryStorage):
        def kind(self, path: str) -> Any:
            return "network"

    storage, found = FarAway({"f": raw(matrix())}), {"p": torch.zeros(ROWS, 64)}
    counters = ThreadedExecutor(1).run(scheduled(columns(300, 64)), storage, found)
    assert torch.equal(found["p"], matrix()[:, 300:364])
    assert counters.reads == len(storage.reads) == 1


@pytest.mark.parametrize(("shared", "way"), [(False, "direct"), (True, "buffered: shared")])
def test_a_read_in_strips_is_looked_at_once(shared: bool, way: str) -> None:
    storage, found = UncachedStorage({"f": raw(matrix())}), {"p": torch.zeros(ROWS, 64)}
    schedule = scheduled(columns(300, 64))
    counters = ThreadedExecutor(1, shared=shared).run(schedule, storage, found)
    assert torch.equal(found["p"], matrix()[:, 300:364])
    assert counters.ways == {way: schedule.bytes_read}
    assert (len(storage.reads), storage.looks) == (3, 2)  # and once to tell whether the load waits for a disk
