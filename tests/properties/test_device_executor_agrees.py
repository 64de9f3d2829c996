"""The executor for GPUs fills the same parameters with the same bytes as plain indexing does, on whichever devices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fake_device import Elsewhere, FakeDevices
from helpers.memory_storage import MemoryStorage
from helpers.random_parameters import assert_filled, assert_nothing_else_changed, laid_out
from helpers.random_plans import World, costs, worlds
from helpers.simulate import naive
from tensorferry.core.lower import lower
from tensorferry.execute import ThreadedExecutor
from tensorferry.execute.device import DeviceExecutor

GPUS = ("cuda:0", "cuda:1")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=150, deadline=None)
@given(world=worlds(), cost=costs, data=st.data())
def test_devices_that_are_late_get_what_plain_indexing_gives(world: World, cost: dict[str, Any], data: Any) -> None:
    plan = world.plan()
    laid = data.draw(laid_out(plan))
    where = {name: data.draw(st.sampled_from(("cpu", *GPUS))) for name in plan.parameters}
    devices, ready = FakeDevices(names=GPUS), list[str]()
    executor = DeviceExecutor(2, ThreadedExecutor(2, pinned=False), accelerator=devices)
    executor.run(
        lower(plan, **cost),
        MemoryStorage(world.frozen_files()),
        Elsewhere(laid.tensors, where),
        on_ready=ready.append,
    )
    assert_filled(laid.tensors, naive(plan, world.values))
    assert_nothing_else_changed(laid)
    assert sorted(ready) == sorted({step.parameter for step in plan.steps})
    assert devices.pinned == {}
