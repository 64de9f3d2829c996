"""Every executor fills the same parameters with the same bytes as plain indexing does."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.memory_storage import MemoryStorage
from helpers.random_plans import World, costs, cuts, worlds
from helpers.simulate import POISON, naive
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan
from tensorferry.execute import Executor, Feeder, SimpleExecutor, ThreadedExecutor
from tensorferry.execute.placing import region_of
from tensorferry.execute.simple import read_entry
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape

MANY = settings(max_examples=150, deadline=None)


def _poisoned(plan: Plan) -> dict[str, torch.Tensor]:
    out = {}
    for name, spec in plan.parameters.items():
        shape = torch_shape(spec.dtype, spec.shape)
        raw = torch.full((prod(shape) * torch_dtype(spec.dtype).itemsize,), POISON, dtype=torch.uint8)
        out[name] = raw.view(torch_dtype(spec.dtype)).view(shape)
    return out


def _assert_equal(found: dict[str, torch.Tensor], world: World, plan: Plan) -> None:
    for name, values in naive(plan, world.values).items():
        raw = found[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        np.testing.assert_array_equal(raw, np.ascontiguousarray(values).reshape(-1).view(np.uint8), err_msg=name)


@pytest.mark.parametrize("executor", [SimpleExecutor(), ThreadedExecutor(1), ThreadedExecutor(3)])
@MANY
@given(world=worlds(), cost=costs)
def test_an_executor_gives_what_plain_indexing_gives(executor: Executor, world: World, cost: dict[str, Any]) -> None:
    plan = world.plan()
    found = _poisoned(plan)
    ready: list[str] = []
    executor.run(lower(plan, **cost), MemoryStorage(world.frozen_files()), found, on_ready=ready.append)
    _assert_equal(found, world, plan)
    assert len(ready) == len(set(ready))
    assert set(ready) >= {s.parameter for s in plan.steps if s.into.size}


@MANY
@given(world=worlds(), cost=costs)
def test_the_threaded_executor_reads_exactly_what_was_scheduled(world: World, cost: dict[str, Any]) -> None:
    plan = world.plan()
    schedule, storage = lower(plan, **cost), MemoryStorage(world.frozen_files())
    counters = ThreadedExecutor(2).run(schedule, storage, _poisoned(plan))
    assert counters.bytes_read == schedule.bytes_read == sum(n for _, _, n in storage.reads) or counters.direct_bytes
    assert counters.bytes_read == schedule.bytes_read
    assert counters.reads == schedule.reads


@MANY
@given(world=worlds())
def test_feeding_whole_tensors_in_any_order_gives_the_same(world: World) -> None:
    plan = world.plan()
    found, storage = _poisoned(plan), MemoryStorage(world.frozen_files())
    feeder = Feeder(plan, found)
    for entry in reversed(world.entries):
        feeder.feed(entry.name, read_entry(storage, entry))
    feeder.finish()
    _assert_equal(found, world, plan)


@MANY
@given(world=worlds(), data=st.data())
def test_feeding_parts_of_any_view_in_any_order_gives_the_same(world: World, data: st.DataObject) -> None:
    plan = world.plan()
    found, storage = _poisoned(plan), MemoryStorage(world.frozen_files())
    parts = [(e, region) for e in world.entries for region in data.draw(cuts(e.shape, block=e.dtype.block), e.name)]
    feeder = Feeder(plan, found, borrowed=True)
    for entry, region in data.draw(st.permutations(parts)):
        buffer = region_of(read_entry(storage, entry), region, entry.dtype).clone()
        feeder.feed(entry.name, buffer, region)
        buffer.copy_(torch.full((buffer.nbytes,), POISON, dtype=torch.uint8).view(buffer.dtype).view(buffer.shape))
    feeder.finish()
    _assert_equal(found, world, plan)
