"""Whatever is planned, running its schedule gives what plain indexing gives, and reads no more than it must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings

from helpers.random_plans import World, costs, worlds
from helpers.simulate import bytes_needed, naive, simulate
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Schedule

MANY = settings(max_examples=200, deadline=None)


def _needs_more_than_once(plan: Plan) -> bool:
    """Whether some entry has bytes that stand for several of its elements."""
    return any(0 in (c.strides or ()) for step in plan.steps for s in step.sources for c in s.entry.chunks)


@MANY
@given(worlds(), costs)
def test_running_a_schedule_equals_plain_indexing(world: World, cost: dict[str, Any]) -> None:
    plan = world.plan()
    assert not plan.problems
    found = simulate(lower(plan, **cost), world.frozen_files())
    expected = naive(plan, world.values)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].view(np.uint8), values.view(np.uint8), err_msg=name)


@MANY
@given(worlds(), costs)
def test_every_byte_needed_is_read_and_without_gaps_nothing_else(world: World, cost: dict[str, Any]) -> None:
    plan = world.plan()
    schedule = lower(plan, **cost)
    needed = bytes_needed(plan)
    read = [(r.file, at + k) for b in schedule.batches for r in b.reads for at, n in r.runs for k in range(n)]
    assert needed <= set(read)
    if cost["max_gap"] == 0:
        assert needed == set(read)
        if not _needs_more_than_once(plan):
            # What two steps need comes once for each, unless one batch is for both.
            at_most = sum(len(bytes_needed(replace(plan, steps=(step,)))) for step in plan.steps)
            assert len(needed) <= len(read) == schedule.bytes_read <= at_most


@MANY
@given(worlds(), costs)
def test_a_batch_stays_within_the_staging_bound_unless_it_is_one_task(world: World, cost: dict[str, Any]) -> None:
    for batch in lower(world.plan(), **cost).batches:
        assert batch.staging == sum(r.length for r in batch.reads) + batch.room
        assert batch.room >= 0
        assert batch.staging <= cost["max_staging"] or len(batch.tasks) == 1


@MANY
@given(worlds(), costs)
def test_reads_stay_within_bounds_of_size_and_waste(world: World, cost: dict[str, Any]) -> None:
    plan = world.plan()
    widest = max((s.entry.dtype.block_bytes for step in plan.steps for s in step.sources), default=1)
    for batch in lower(plan, **cost).batches:
        for read in batch.reads:
            assert read.length <= max(cost["max_read"], widest)


@settings(max_examples=50, deadline=None)
@given(worlds(), costs)
def test_lowering_twice_gives_the_same_schedule(world: World, cost: dict[str, Any]) -> None:
    first, second = (lower(world.plan(), **cost) for _ in range(2))
    assert first.batches == second.batches
    assert isinstance(first, Schedule)
