"""The stream of (name, tensor): its order, how far it reads ahead, and how it ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import ar, raw
from helpers.memory_storage import MemoryStorage
from tensorferry.config import ReadOptions
from tensorferry.core.boxes import Box
from tensorferry.core.catalogue import Chunk, Span, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.errors import ReadError
from tensorferry.execute.base import Counters
from tensorferry.execute.pool import Readers
from tensorferry.execute.simple import read_entry
from tensorferry.execute.stream import mapped, stream
from tensorferry.storage.local import LocalStorage

F32 = DTYPES["F32"]
SIZE = 4096  # bytes of each tensor below
OPTIONS = ReadOptions(max_staging=4 * SIZE, max_read=SIZE, threads=2)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def _tensors(count: int, size: int = SIZE) -> tuple[MemoryStorage, list[TensorEntry], list[torch.Tensor]]:
    tensors = [ar(size // 4, start=1000 * i) for i in range(count)]
    entries = [TensorEntry.at(f"t{i}", F32, (size // 4,), "f", i * size) for i in range(count)]
    return MemoryStorage({"f": b"".join(map(raw, tensors))}), entries, tensors


def test_tensors_come_in_the_order_given_with_their_values() -> None:
    storage, entries, tensors = _tensors(20)
    order = [*entries[10:], *entries[:10]]
    found = list(stream(storage, order, OPTIONS))
    assert [name for name, _ in found] == [e.name for e in order]
    assert all(torch.equal(t, tensors[int(name[1:])]) for name, t in found)


def test_at_most_the_staging_bound_is_read_ahead_of_the_consumer() -> None:
    storage, entries, _ = _tensors(40)
    taken = 0
    for _ in stream(storage, entries, OPTIONS):
        taken += SIZE
        assert sum(n for _, _, n in list(storage.reads)) - taken <= OPTIONS.max_staging
    assert taken == 40 * SIZE


def test_a_tensor_larger_than_the_bound_is_read_alone() -> None:
    storage, entries, tensors = _tensors(3, size=8 * SIZE)
    for n, (_, tensor) in enumerate(stream(storage, entries, OPTIONS)):
        assert torch.equal(tensor, tensors[n])
        assert sum(length for _, _, length in list(storage.reads)) <= (n + 1) * 8 * SIZE + 8 * SIZE


def test_no_read_is_larger_than_the_options_allow() -> None:
    storage, entries, _ = _tensors(3, size=8 * SIZE + 4)
    list(stream(storage, entries, OPTIONS))
    assert max(n for _, _, n in storage.reads) == SIZE


def test_what_it_read_is_counted() -> None:
    storage, entries, _ = _tensors(10, size=2 * SIZE)
    counters = Counters()
    list(stream(storage, entries, OPTIONS, counters))
    assert counters.bytes_read == sum(n for _, _, n in storage.reads) == 20 * SIZE
    assert counters.reads == len(storage.reads) == 20
    assert counters.staging_peak == OPTIONS.max_staging


def test_nothing_is_read_before_the_first_tensor_is_asked_for() -> None:
    storage, entries, _ = _tensors(3)
    stream(storage, entries, OPTIONS)
    assert storage.reads == []


def test_closing_early_stops_the_readers() -> None:
    storage, entries, _ = _tensors(100)
    with closing(stream(storage, entries, OPTIONS)) as tensors:
        next(tensors)
    assert len(storage.reads) <= 5


def test_closing_does_not_wait_for_the_rest_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, closing_begun = threading.Event(), threading.Event()

    class Threads(Readers[torch.Tensor]):
        def close(self, patience: float | None = None) -> int:
            closing_begun.set()
            return super().close(None)

        def __class_getitem__(cls, item: object) -> type[Readers[torch.Tensor]]:
            return cls

    def hold(path: str, offset: int, length: int) -> None:
        if offset >= 64 * SIZE:
            begun.set()
            assert closing_begun.wait(60)

    monkeypatch.setattr(sys.modules["tensorferry.execute.stream"], "Readers", Threads)
    storage, entries, _ = _tensors(2, size=64 * SIZE)
    storage.before_read = hold
    tensors = stream(storage, entries, ReadOptions(max_staging=1 << 20, max_read=SIZE, threads=2))
    next(tensors)
    assert begun.wait(60)
    tensors.close()
    assert sum(offset >= 64 * SIZE for _, offset, _ in storage.reads) == 1


def test_a_failed_read_is_raised_at_its_tensor_and_after_those_before_it() -> None:
    storage, entries, _ = _tensors(6)

    def fail(path: str, offset: int, length: int) -> None:
        if offset == 3 * SIZE:
            raise ReadError(f"{path}: gone")

    storage.before_read = fail
    seen: list[str] = []
    with pytest.raises(ReadError, match=r"f: gone \(while reading t3\)"):
        seen.extend(name for name, _ in stream(storage, entries, OPTIONS))
    assert seen in ([], ["t0", "t1", "t2"])


def test_tensors_that_lie_in_strides_or_in_pieces_come_in_order() -> None:
    base = ar(4, 6)
    storage = MemoryStorage({"f": raw(base), "g": raw(base[:, :2]), "h": raw(base[:, 2:])})
    strided = TensorEntry.at("s", F32, (6, 4), "f", 0, strides=(1, 6), length=96)
    chunks = (
        Chunk(Box((0, 0), (4, 2)), Span("g", 0, 32)),
        Chunk(Box((0, 2), (4, 6)), Span("h", 0, 64)),
    )
    pieces = TensorEntry("p", F32, (4, 6), chunks)
    found = dict(stream(storage, [strided, pieces], OPTIONS))
    assert torch.equal(found["s"], base.t())
    assert found["s"].is_contiguous()
    assert torch.equal(found["p"], base)


def test_a_span_that_only_its_format_can_read_is_refused() -> None:
    entry = TensorEntry("z", F32, (2,), (Chunk(None, None),))
    with pytest.raises(ReadError, match="z: its bytes are no span of a file"):
        read_entry(MemoryStorage({}), entry)


def test_reading_is_not_confused_by_a_default_device() -> None:
    storage, entries, tensors = _tensors(1)
    with torch.device("meta"):
        found = read_entry(storage, entries[0])
    assert torch.equal(found, tensors[0])


def test_mapped_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(raw(ar(8)))
    entries = [TensorEntry.at(f"t{i}", F32, (4,), "f", 16 * i) for i in range(2)]
    with LocalStorage(tmp_path) as storage:
        found = dict(mapped(storage, entries))
        assert storage.counters.reads == 0
    assert found["t0"].untyped_storage().data_ptr() == found["t1"].untyped_storage().data_ptr()
    assert found["t1"].tolist() == [4, 5, 6, 7]


def test_a_mapped_tensor_on_an_odd_offset_is_copied(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" + raw(ar(4)))
    with LocalStorage(tmp_path) as storage:
        ((_, tensor),) = mapped(storage, [TensorEntry.at("t", F32, (4,), "f", 1)])
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("left", [0, 3, 20])
def test_a_mapped_file_that_was_cut_is_a_read_that_failed(tmp_path: Path, left: int) -> None:
    (tmp_path / "f").write_bytes(raw(ar(8))[:left])
    entries = [TensorEntry.at(f"t{i}", F32, (4,), "f", 16 * i) for i in range(2)]
    with LocalStorage(tmp_path) as storage, pytest.raises(ReadError, match=f"f: is shorter .*: t{left // 16} ends"):
        list(mapped(storage, entries))


def test_mapping_gives_tensors_without_elements_and_scalars(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(raw(ar(1, start=5)))
    entries = [TensorEntry.at("n", F32, (0, 3), "f", 0), TensorEntry.at("s", F32, (), "f", 0)]
    with LocalStorage(tmp_path) as storage:
        found = dict(mapped(storage, entries))
    assert found["n"].shape == (0, 3)
    assert (found["s"].shape, found["s"].item()) == ((), 5)
