"""Every executor, on each of its ways, fills the same parameters with the same bytes as plain indexing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.memory_storage import MemoryStorage
from helpers.pushing import Pushing
from helpers.random_parameters import assert_filled, assert_nothing_else_changed, laid_out, poisoned
from helpers.random_plans import World, costs, cuts, worlds
from helpers.simulate import POISON, naive
from tensorferry.config import ReadOptions
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.lower import lower
from tensorferry.execute import Executor, Feeder, SimpleExecutor, ThreadedExecutor, stream
from tensorferry.execute.mapping import mapped_parameters
from tensorferry.execute.placing import region_of
from tensorferry.execute.simple import read_entry
from tensorferry.loaders.strategies import EagerExecutor, PrefetchExecutor
from tensorferry.storage.base import Storage
from tensorferry.storage.local import LocalStorage

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SMALL = ReadOptions(max_staging=8192, max_read=4096)


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch's, of its own type


def streamed(storage: Storage, entries: Sequence[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Bring tensors as a stream, in memory of their own."""
    yield from stream(storage, entries, SMALL)


@contextmanager
def in_files(world: World, folder: Path) -> Iterator[Storage]:
    """Yield the files of a world on disk; they are removed in the end."""
    for name, data in world.files.items():
        (folder / name).write_bytes(data)
    with LocalStorage(folder) as storage:
        yield storage


def in_memory(world: World, folder: Path) -> Any:
    """Return the files of a world in memory."""
    return nullcontext(MemoryStorage(world.frozen_files()))


@contextmanager
def in_pieces(world: World, folder: Path) -> Iterator[Storage]:
    """Yield the files of a world on disk; what takes strips, and fresh memory, gets them in pieces of a few bytes."""
    with (
        patch("tensorferry.execute.strips._STRIP", 16),
        patch("tensorferry.storage.touching.PIECE", 16),
        patch("tensorferry.storage.handle.PIECE", 16),
        patch("tensorferry.storage.touching.is_untouched", bool),
        patch("tensorferry.storage.touching._touch", len),
        in_files(world, folder) as storage,
    ):
        yield storage


@contextmanager
def lent(world: World, folder: Path) -> Iterator[Storage]:
    """Yield the files of a world on disk; whatever lies in the page cache is lent, however little it is."""
    with patch("tensorferry.execute.ways._LEAST", 1), in_files(world, folder) as storage:
        yield storage


class Way(NamedTuple):
    """An executor, and what it reads from."""

    executor: Executor
    where: Callable[[World, Path], Any] = in_files
    direct: bool = False


WAYS = {
    "simple": Way(SimpleExecutor(), in_memory),
    "one thread": Way(ThreadedExecutor(1), in_memory),
    "threads": Way(ThreadedExecutor(3), in_memory),
    "files": Way(ThreadedExecutor(2)),
    "buffered": Way(ThreadedExecutor(3, direct="never")),
    "direct": Way(ThreadedExecutor(3, direct="always"), direct=True),
    "pieces": Way(ThreadedExecutor(2), in_pieces),
    "lent": Way(ThreadedExecutor(2), lent),
    "uncached": Way(ThreadedExecutor(2, direct="never", keep_cache=False)),
    "eager": Way(EagerExecutor(SMALL)),
    "prefetch": Way(PrefetchExecutor(SMALL)),
    "stream": Way(Pushing(streamed)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@MANY
@given(world=worlds(), cost=costs, data=st.data())
def test_an_executor_gives_what_plain_indexing_gives(
    way: Way, world: World, cost: dict[str, Any], data: st.DataObject, tmp_path: Path
) -> None:
    plan, ready = world.plan(), list[str]()
    laid = data.draw(laid_out(plan))
    with way.where(world, tmp_path) as storage:
        if way.direct and not all(storage.uncached(name).possible for name in world.files):
            pytest.skip("temporary files lie where direct reads are impossible")
        way.executor.run(lower(plan, **cost), storage, laid.tensors, on_ready=ready.append)
    assert_filled(laid.tensors, naive(plan, world.values))
    assert_nothing_else_changed(laid)
    assert len(ready) == len(set(ready))
    assert set(ready) >= {s.parameter for s in plan.steps if s.into.size}


@MANY
@given(world=worlds(), cost=costs)
def test_views_of_mapped_files_and_what_is_read_beside_them_are_the_same(
    world: World, cost: dict[str, Any], tmp_path: Path
) -> None:
    plan = world.plan()
    with in_files(world, tmp_path) as storage:
        mapped = mapped_parameters(plan, storage, plan.parameters)
        found = {name: tensor for name, tensor in poisoned(plan).items() if name not in mapped}
        rest = replace(plan, steps=tuple(step for step in plan.steps if step.parameter not in mapped))
        ThreadedExecutor(2).run(lower(rest, **cost), storage, found)
    assert_filled({**found, **mapped}, naive(plan, world.values))


@MANY
@given(world=worlds(), cost=costs)
def test_the_threaded_executor_reads_exactly_what_was_scheduled(world: World, cost: dict[str, Any]) -> None:
    plan = world.plan()
    schedule, storage = lower(plan, **cost), MemoryStorage(world.frozen_files())
    counters = ThreadedExecutor(2).run(schedule, storage, poisoned(plan))
    assert counters.bytes_read == schedule.bytes_read == sum(n for _, _, n in storage.reads) or counters.direct_bytes
    assert counters.bytes_read == schedule.bytes_read
    assert counters.reads == schedule.reads


@MANY
@given(world=worlds())
def test_feeding_whole_tensors_in_any_order_gives_the_same(world: World) -> None:
    plan = world.plan()
    found, storage = poisoned(plan), MemoryStorage(world.frozen_files())
    feeder = Feeder(plan, found)
    for entry in reversed(world.entries):
        feeder.feed(entry.name, read_entry(storage, entry))
    feeder.finish()
    assert_filled(found, naive(plan, world.values))


@MANY
@given(world=worlds(), data=st.data())
def test_feeding_parts_of_any_view_in_any_order_gives_the_same(world: World, data: st.DataObject) -> None:
    plan = world.plan()
    found, storage = poisoned(plan), MemoryStorage(world.frozen_files())
    parts = [(e, region) for e in world.entries for region in data.draw(cuts(e.shape, block=e.dtype.block), e.name)]
    feeder = Feeder(plan, found, borrowed=True)
    for entry, region in data.draw(st.permutations(parts)):
        buffer = region_of(read_entry(storage, entry), region, entry.dtype).clone()
        feeder.feed(entry.name, buffer, region)
        buffer.copy_(torch.full((buffer.nbytes,), POISON, dtype=torch.uint8).view(buffer.dtype).view(buffer.shape))
    feeder.finish()
    assert_filled(found, naive(plan, world.values))
