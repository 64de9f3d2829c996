"""The threaded executor: how far it goes at once, what goes straight into parameters, and how it stops."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeVar

import pytest
import torch

from helpers.checkpoints import ar, raw
from helpers.memory_storage import MemoryStorage
from tensorferry.config import ReadOptions
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan
from tensorferry.core.planning import make_plan
from tensorferry.core.target import TargetTensor
from tensorferry.errors import ReadError
from tensorferry.execute import ThreadedExecutor
from tensorferry.execute.pool import Readers
from tensorferry.numerics.torch_dtypes import dtype_of

_T = TypeVar("_T")
F32, F64 = DTYPES["F32"], DTYPES["F64"]


class ScatterStorage(MemoryStorage):
    """Fills several buffers at once, and notes into how many."""

    scattered: list[int]

    def read_vector(self, path: str, offset: int, outs: Sequence[memoryview]) -> None:
        self.scattered = [*getattr(self, "scattered", []), len(outs)]
        for out in outs:
            self.read_into(path, offset, out)
            offset += len(out)


def _planned(
    tensors: dict[str, torch.Tensor], *, into: torch.dtype | None = None, gap: int = 0, begin: int = 0
) -> tuple[Plan, bytes]:
    entries, data, target = [], bytes(begin), {}
    for name, tensor in tensors.items():
        entries.append(TensorEntry.at(name, dtype_of(tensor.dtype), tuple(tensor.shape), "f", len(data)))
        data += raw(tensor) + b"\xaa" * gap
        target[name] = TargetTensor.plain(name, dtype_of(into or tensor.dtype), tuple(tensor.shape))
    return make_plan(Catalogue(entries, format="memory"), target), data


def _empty(plan: Plan, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(spec.shape, dtype=dtype) for name, spec in plan.parameters.items()}


MANY = {f"t{i}": ar(16, start=100 * i) for i in range(20)}  # 64 bytes each
WIDE = {"max_gap": 64, "max_read": 1 << 20, "max_staging": 1 << 20, "waste": 8.0}


def test_what_needs_no_change_is_read_straight_into_parameters() -> None:
    plan, data = _planned(MANY)
    counters = ThreadedExecutor(2).run(lower(plan, **WIDE), MemoryStorage({"f": data}), _empty(plan))  # type: ignore[arg-type]
    assert counters.direct_bytes == counters.bytes_read == 20 * 64
    assert counters.staging_peak == 0


def test_one_read_fills_many_parameters_and_skips_the_holes_between_them() -> None:
    plan, data = _planned(MANY, gap=24)
    storage, found = ScatterStorage({"f": data}), _empty(plan)
    counters = ThreadedExecutor(2).run(lower(plan, **WIDE), storage, found)  # type: ignore[arg-type]
    assert storage.scattered == [20 + 19]
    assert counters.reads == 1
    assert (counters.bytes_read, counters.direct_bytes) == (20 * 64 + 19 * 24, 20 * 64)
    assert all(torch.equal(found[n], t) for n, t in MANY.items())


def test_what_is_cast_is_staged() -> None:
    plan, data = _planned(MANY, into=torch.float64)
    found = _empty(plan, torch.float64)
    counters = ThreadedExecutor(2).run(lower(plan, **WIDE), MemoryStorage({"f": data}), found)  # type: ignore[arg-type]
    assert counters.direct_bytes == 0
    assert counters.staging_peak == 20 * 64
    assert all(torch.equal(found[n], t.double()) for n, t in MANY.items())


def test_what_is_staged_to_keep_bytes_aligned_counts_towards_the_bound() -> None:
    plan, data = _planned(MANY, into=torch.float64, begin=8)
    schedule = lower(plan, max_gap=0, max_read=64, max_staging=256, waste=1.0)
    storage = MemoryStorage({"f": data})
    assert 0 < ThreadedExecutor(8).run(schedule, storage, _empty(plan, torch.float64)).staging_peak <= 256


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_no_more_than_the_bound_is_staged_at_once(threads: int) -> None:
    plan, data = _planned(MANY, into=torch.float64)
    schedule = lower(plan, max_gap=0, max_read=64, max_staging=192, waste=1.0)
    lock, now, peak = threading.Lock(), 0, 0
    all_busy = threading.Barrier(min(threads, 3))

    def count(path: str, offset: int, length: int) -> None:
        nonlocal now, peak
        with lock:
            now += length
            peak = max(peak, now)
        if offset < 64 * min(threads, 3):
            all_busy.wait(60)  # the first ones run together, as many as may
        with lock:
            now -= length

    storage = MemoryStorage({"f": data}, before_read=count)
    counters = ThreadedExecutor(threads).run(schedule, storage, _empty(plan, torch.float64))
    assert peak == 64 * min(threads, 3)
    assert counters.staging_peak <= 192


def test_the_first_error_is_raised_and_the_others_stop() -> None:
    plan, data = _planned(MANY)
    schedule = lower(plan, max_gap=0, max_read=64, max_staging=640, waste=1.0)

    def fail(path: str, offset: int, length: int) -> None:
        if offset == 5 * 64:
            raise ReadError("f: gone")

    storage = MemoryStorage({"f": data}, before_read=fail)
    before = set(threading.enumerate())
    with pytest.raises(ReadError, match=r"f: gone \(while reading t5\)"):
        ThreadedExecutor(1).run(schedule, storage, _empty(plan))
    assert set(threading.enumerate()) == before
    assert len(storage.reads) < 20


def test_a_thread_that_is_reading_when_another_one_fails_does_not_begin_another_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, data = _planned({f"t{i}": ar(16, start=100 * i) for i in range(4)}, gap=4096)
    begun, ending = threading.Event(), threading.Event()

    class Threads(Readers[_T]):
        def close(self, patience: float | None = None) -> int:
            ending.set()
            return super().close(patience)

    def fail(path: str, offset: int, length: int) -> None:
        if offset > 0:
            assert begun.wait(60)
            raise ReadError("f: gone")
        begun.set()
        assert ending.wait(60)

    monkeypatch.setattr("tensorferry.execute.threaded.Readers", Threads)
    schedule = lower(plan, max_gap=0, max_read=128, max_staging=256, waste=1.0)
    assert [len(batch.reads) for batch in schedule.batches] == [2, 2]
    storage = MemoryStorage({"f": data}, before_read=fail)
    with pytest.raises(ReadError):
        ThreadedExecutor(2).run(schedule, storage, _empty(plan))
    assert [offset for _, offset, _ in storage.reads] == [0]


def test_an_error_stops_the_others_even_while_a_module_is_post_processed() -> None:
    plan, data = _planned(MANY)
    schedule = lower(plan, max_gap=0, max_read=64, max_staging=640, waste=1.0)
    failed = threading.Event()

    def fail(path: str, offset: int, length: int) -> None:
        if offset == 64:
            failed.set()
            raise ReadError("f: gone")

    def post_process(name: str) -> None:
        assert failed.wait(60)

    storage = MemoryStorage({"f": data}, before_read=fail)
    with pytest.raises(ReadError):
        ThreadedExecutor(1).run(schedule, storage, _empty(plan), on_ready=post_process)
    assert [offset for _, offset, _ in storage.reads] == [0]


def test_ready_parameters_are_told_while_others_are_still_to_come() -> None:
    plan, data = _planned(MANY)
    schedule = lower(plan, max_gap=0, max_read=64, max_staging=64, waste=1.0)
    storage, seen = MemoryStorage({"f": data}), list[tuple[str, int]]()
    ThreadedExecutor(1).run(schedule, storage, _empty(plan), on_ready=lambda n: seen.append((n, len(storage.reads))))
    assert seen[0] == ("t0", 1)
    assert [name for name, _ in seen] == list(MANY)


def test_a_read_that_hangs_is_not_waited_for_when_another_one_fails() -> None:
    plan, data = _planned(MANY)
    schedule = lower(plan, max_gap=0, max_read=64, max_staging=640, waste=1.0)
    hanging, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def fail(path: str, offset: int, length: int) -> None:
        if offset == 0:
            hanging.set()
            go_on.wait(60)
            ended.set()
        elif hanging.wait(60):
            raise ReadError("f: gone")

    found = _empty(plan)
    with pytest.raises(ReadError, match=r"f: gone \(while reading t\d+\)") as caught:
        ThreadedExecutor(2).run(schedule, MemoryStorage({"f": data}, before_read=fail), found)
    assert any("1 read of memory did not return within 1 s" in note for note in caught.value.__notes__)
    assert not ended.is_set()
    del found  # what it reads into stays until it has ended
    go_on.set()
    assert ended.wait(60)


def test_bytes_that_are_staged_are_counted_as_copied_and_others_not() -> None:
    plan, data = _planned(MANY)
    cast, _ = _planned(MANY, into=torch.float64)
    plain = ThreadedExecutor(2).run(lower(plan, **WIDE), MemoryStorage({"f": data}), _empty(plan))  # type: ignore[arg-type]
    staged = ThreadedExecutor(2).run(lower(cast, **WIDE), MemoryStorage({"f": data}), _empty(cast, torch.float64))  # type: ignore[arg-type]
    assert (plain.copied_bytes, staged.copied_bytes) == (0, 20 * 64)
    assert plain.ways == staged.ways == {"buffered": 20 * 64}


@pytest.mark.parametrize(("kind", "threads"), [("remote", 16), ("network", 8), ("local", 4)])
def test_there_are_as_many_threads_as_suit_the_storage_that_is_read(
    kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, data = _planned({"p": torch.ones(1000)})
    storage, most, begun = MemoryStorage({"f": data}), [], Readers.__init__

    def made(self: Readers[int], threads: int) -> None:
        most.append(threads)
        begun(self, threads)

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(storage, "kind", lambda path: kind)
    monkeypatch.setattr(Readers, "__init__", made)
    schedule = lower(plan, max_gap=0, max_read=8 << 20, max_staging=64 << 20, waste=1.0)
    found = {"p": torch.empty(1000)}
    ThreadedExecutor.of(ReadOptions(shared=False)).run(schedule, storage, found)
    assert most == [threads]
    assert bool((found["p"] == 1).all())
    ThreadedExecutor.of(ReadOptions(shared=False, threads=3)).run(schedule, storage, found)
    assert most[1:] == [3]
