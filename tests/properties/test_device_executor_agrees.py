"""The executor for GPUs fills the same parameters with the same bytes as plain indexing does, on whichever devices."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fake_device import Elsewhere, FakeDevices
from helpers.memory_storage import MemoryStorage
from helpers.random_plans import World, costs, worlds
from helpers.simulate import POISON, naive
from tensorferry.core.lower import lower
from tensorferry.execute import ThreadedExecutor
from tensorferry.execute.device import DeviceExecutor
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape

GPUS = ("cuda:0", "cuda:1")


@settings(max_examples=150, deadline=None)
@given(world=worlds(), cost=costs, data=st.data())
def test_devices_that_are_late_get_what_plain_indexing_gives(world: World, cost: dict[str, Any], data: Any) -> None:
    plan, tensors, where = world.plan(), {}, {}
    for name, spec in plan.parameters.items():
        shape = torch_shape(spec.dtype, spec.shape)
        blank = torch.full((prod(shape) * torch_dtype(spec.dtype).itemsize,), POISON, dtype=torch.uint8)
        tensors[name] = blank.view(torch_dtype(spec.dtype)).view(shape)
        where[name] = data.draw(st.sampled_from(("cpu", *GPUS)))
    devices, ready = FakeDevices(names=GPUS), list[str]()
    executor = DeviceExecutor(2, ThreadedExecutor(2, pinned=False), accelerator=devices)
    executor.run(
        lower(plan, **cost),
        MemoryStorage(world.frozen_files()),
        Elsewhere(tensors, where),
        on_ready=ready.append,
    )
    for name, values in naive(plan, world.values).items():
        found = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        np.testing.assert_array_equal(found, np.ascontiguousarray(values).reshape(-1).view(np.uint8), err_msg=name)
    assert sorted(ready) == sorted({step.parameter for step in plan.steps})
    assert devices.pinned == {}
