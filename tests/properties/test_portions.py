"""A plan in portions makes the same bytes as the plan at once, however small the portions are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.memory_storage import MemoryStorage
from helpers.random_plans import World, costs, worlds
from helpers.simulate import naive
from tensorferry.core.lower import lower
from tensorferry.core.portions import portions
from tensorferry.core.transforms import TensorSpec
from tensorferry.execute import ThreadedExecutor
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape


def _empty(spec: TensorSpec) -> torch.Tensor:
    raw = torch.zeros(spec.dtype.nbytes(spec.shape), dtype=torch.uint8)
    return raw.view(torch_dtype(spec.dtype)).view(torch_shape(spec.dtype, spec.shape))


@settings(max_examples=300, deadline=None)
@given(world=worlds(), cost=costs, most=st.integers(1, 300))
def test_portions_one_after_the_other_are_the_bytes_of_each_parameter(
    world: World, cost: dict[str, Any], most: int
) -> None:
    plan, storage = world.plan(), MemoryStorage(world.frozen_files())
    order = sorted(plan.parameters, reverse=True)
    found = dict.fromkeys(order, b"")
    seen: list[str] = []
    for portion in portions(plan, order, most):
        made = {name: _empty(spec) for name, spec in portion.parameters.items()}
        ThreadedExecutor(1).run(lower(portion, **cost), storage, made)
        for name, tensor in made.items():
            found[name] += tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        seen += made
    assert list(dict.fromkeys(seen)) == order
    expected = naive(plan, world.values)
    assert found == {name: np.ascontiguousarray(expected[name]).tobytes() for name in order}
