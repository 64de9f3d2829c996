"""The strategies lazy, eager and prefetch load the same values; counters tell what each has read, and its bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_safetensors
from tensorferry.config import ReadOptions
from tensorferry.core.schedule import Read
from tensorferry.errors import ReadError
from tensorferry.execute.base import Counters
from tensorferry.loaders import DefaultModelLoader, LoadConfig, ModelConfig
from tensorferry.loaders.strategies import Eager, Prefetch, halved
from tensorferry.storage.base import File
from tensorferry.storage.local import LocalStorage

KIB = 1024
STRATEGIES = ["lazy", "eager", "prefetch"]


class Part(nn.Module):
    """Wants the middle one of three tensors, of 64 KiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(128, 128))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    weights = {name: ar(128, 128, start=start) for name, start in (("a", 0), ("b", 1000), ("c", 2000))}
    write_safetensors(tmp_path / "model.safetensors", weights)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("tensorferry")] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_are_the_same_and_the_report_says_how_they_were_read(strategy: str, folder: Path) -> None:
    loader = DefaultModelLoader(LoadConfig.from_dict({"strategy": strategy}))
    model = loader.load_model(ModelConfig(str(folder)), build=lambda c: Part())
    assert torch.equal(model.get_parameter("b"), ar(128, 128, start=1000))
    report = loader.report
    assert report is not None
    size = (folder / "model.safetensors").stat().st_size
    executor, read = {
        "lazy": ("ThreadedExecutor", 64 * KIB),
        "eager": ("EagerExecutor", size),
        "prefetch": ("PrefetchExecutor", 64 * KIB),
    }[strategy]
    assert (report.executor, report.bytes_needed, report.bytes_read) == (executor, 64 * KIB, read)
    assert report.direct_bytes == (0 if strategy == "eager" else 64 * KIB)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_streams_are_read_by_the_strategy_too(strategy: str, folder: Path) -> None:
    config = LoadConfig.from_dict({"strategy": strategy, "read": {"max_staging": 32 * KIB, "max_read": 8 * KIB}})
    stream = DefaultModelLoader(config).get_all_weights(ModelConfig(str(folder)), Part())
    assert [(name, t[0, 0].item(), t.shape) for name, t in stream] == [
        ("a", 0, (128, 128)),
        ("b", 1000, (128, 128)),
        ("c", 2000, (128, 128)),
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stream_may_be_left_early(strategy: str, folder: Path) -> None:
    stream = DefaultModelLoader(LoadConfig.from_dict({"strategy": strategy})).get_all_weights(
        ModelConfig(str(folder)), Part()
    )
    next(stream)
    stream.close()  # type: ignore[attr-defined]


def test_eager_stages_within_the_bound(tmp_path: Path) -> None:
    weights = {f"w{i}": ar(64, 64, start=i) for i in range(32)}
    write_safetensors(tmp_path / "model.safetensors", weights)
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(64, 64)) for name in weights})
    read = {"max_staging": 128 * KIB, "max_read": 16 * KIB, "max_gap": 0}
    loader = DefaultModelLoader(LoadConfig.from_dict({"strategy": "eager", "read": read}))
    report = loader.load_weights(model, ModelConfig(str(tmp_path)))
    assert report.bytes_read == (tmp_path / "model.safetensors").stat().st_size
    assert 0 < report.staging_peak <= 128 * KIB
    assert all(torch.equal(model[name], weights[name]) for name in weights)


def test_eager_gives_reading_and_reading_ahead_half_of_the_bound_each() -> None:
    options = halved(LoadConfig(strategy="eager", read=ReadOptions(max_staging=64 * KIB, max_read=48 * KIB)))
    assert (options.max_staging, options.max_read) == (32 * KIB, 32 * KIB)
    assert halved(LoadConfig()) == LoadConfig().reading


class Watched:
    """A storage that writes down what is read and announced."""

    def __init__(self, inner: LocalStorage) -> None:
        self.inner = inner
        self.reads: list[tuple[str, int, int]] = []
        self.announced: list[tuple[str, int, int]] = []
        self.used = 0
        self.furthest = 0
        self.fails_at: int | None = None
        self.uri = inner.uri

    def list(self) -> Sequence[File]:
        return self.inner.list()

    def stat(self, path: str) -> File:
        return self.inner.stat(path)

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        if self.fails_at is not None and offset <= self.fails_at < offset + len(out):
            raise ReadError(f"{path}: broken at {self.fails_at}")
        self.reads.append((path, offset, len(out)))
        self.inner.read_into(path, offset, out)

    def read_ahead(self, path: str, offset: int, length: int) -> None:
        self.announced.append((path, offset, length))
        self.furthest = max(self.furthest, sum(n for _, _, n in self.announced) - self.used)

    def check_unchanged(self) -> None:
        self.inner.check_unchanged()

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def storage(tmp_path: Path) -> Watched:
    (tmp_path / "one").write_bytes(bytes(range(100)))
    (tmp_path / "two").write_bytes(bytes(range(100, 150)))
    return Watched(LocalStorage(tmp_path))


def taken(storage: Any, path: str, offset: int, length: int) -> bytes:
    out = bytearray(length)
    storage.read_into(path, offset, memoryview(out))
    return bytes(out)


def test_eager_reads_files_from_end_to_end_in_order_and_nothing_twice(storage: Watched) -> None:
    reads = [Read("one", 10, 20), Read("one", 70, 20), Read("two", 0, 10)]
    with Eager(storage, reads, bound=40, block=20) as ahead:
        assert taken(ahead, "one", 10, 20) == bytes(range(10, 30))
        assert taken(ahead, "one", 70, 20) == bytes(range(70, 90))
        assert taken(ahead, "two", 0, 50) == bytes(range(100, 150))
    ahead.correct(counters := Counters())
    assert storage.reads == [("one", at, 20) for at in range(0, 100, 20)] + [
        ("two", 0, 20),
        ("two", 20, 20),
        ("two", 40, 10),
    ]
    assert (counters.bytes_read, counters.reads) == (150, 8)
    assert counters.staging_peak <= 40


def test_eager_reads_what_it_has_let_go_once_more(storage: Watched) -> None:
    with Eager(storage, [Read("one", 0, 100)], bound=40, block=20) as ahead:
        assert taken(ahead, "one", 80, 20) == bytes(range(80, 100))
        assert taken(ahead, "one", 5, 10) == bytes(range(5, 15))
    ahead.correct(counters := Counters())
    assert (counters.bytes_read, counters.reads) == (110, 6)


def test_eager_serves_files_that_it_was_not_told_of(storage: Watched) -> None:
    with Eager(storage, [Read("one", 0, 100)], bound=40, block=20) as ahead:
        assert taken(ahead, "two", 0, 50) == bytes(range(100, 150))


def test_a_fault_ahead_is_raised_where_it_is_read_and_not_before(storage: Watched) -> None:
    storage.fails_at = 50
    with Eager(storage, [Read("one", 0, 100)], bound=40, block=20) as ahead:
        assert taken(ahead, "one", 0, 40) == bytes(range(40))
        with pytest.raises(ReadError, match="one: broken at 50"):
            taken(ahead, "one", 40, 20)
        assert taken(ahead, "one", 60, 20) == bytes(range(60, 80))


def test_a_read_past_the_end_is_refused_as_ever(storage: Watched) -> None:
    with (
        Eager(storage, [Read("two", 0, 50)], bound=40, block=20) as ahead,
        pytest.raises(ReadError, match="ends inside a read"),
    ):
        taken(ahead, "two", 40, 20)


def test_prefetch_announces_what_is_needed_in_order_and_stays_within_the_bound(storage: Watched) -> None:
    reads = [Read("one", 10, 30), Read("two", 0, 30)]
    with Prefetch(storage, reads, bound=30, block=20) as ahead:
        for read in reads:
            for at in range(read.offset, read.offset + read.length, 10):
                taken(ahead, read.file, at, 10)
                storage.used += 10
    assert storage.announced == [
        ("one", 10, 15), ("one", 25, 15), ("two", 0, 15), ("two", 15, 15),
    ][: len(storage.announced)]  # fmt: skip
    assert storage.furthest <= 30
    assert [r[1:] for r in storage.reads] == [(10, 10), (20, 10), (30, 10), (0, 10), (10, 10), (20, 10)]


def test_a_thread_that_waits_is_joined_when_nothing_is_read(storage: Watched) -> None:
    with Prefetch(storage, [Read("one", 0, 100)], bound=20, block=10):
        pass
    with Eager(storage, [Read("one", 0, 100)], bound=20, block=10):
        pass
    assert sum(n for _, _, n in storage.announced) <= 20
    assert sum(n for _, _, n in storage.reads) <= 20


def test_a_local_file_takes_the_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    local = LocalStorage(tmp_path)
    local.read_ahead("file", 0, 10_000)
    local.read_ahead("file", 0, 1 << 40)
    assert local.counters.bytes_read == 0
