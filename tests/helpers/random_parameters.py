"""Parameters for property tests: tensors in odd places of larger memory, in which nothing but they may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from helpers.simulate import POISON
from tensorferry.core.plan import Plan
from tensorferry.errors import PlanError
from tensorferry.execute.placing import refuse_unwritable
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape

__all__ = ["Laid", "assert_filled", "assert_nothing_else_changed", "laid_out", "poisoned"]


@dataclass(frozen=True)
class Laid:
    """Tensors to be filled by name, and the memory around each, of which they are views."""

    tensors: dict[str, torch.Tensor]
    around: dict[str, torch.Tensor]


def poisoned(plan: Plan) -> dict[str, torch.Tensor]:
    """Return row-major tensors that nothing has been written to yet."""
    return {name: _memory(*_kind(plan, name))[1] for name in plan.parameters}


@st.composite
def laid_out(draw: st.DrawFn, plan: Plan) -> Laid:
    """Return tensors that nothing has been written to, their dimensions in any order, with holes between elements.

    Row-major where what the plan puts into them could not be written otherwise, which loads refuse before they begin.
    """
    tensors, around = {}, {}
    for name in plan.parameters:
        around[name], tensors[name] = draw(_scattered(*_kind(plan, name)))
        try:
            refuse_unwritable(plan, {name: tensors[name]})
        except PlanError:
            around[name], tensors[name] = _memory(*_kind(plan, name))
    return Laid(tensors, around)


@st.composite
def _scattered(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    order = draw(st.permutations(range(len(shape))))
    lead = draw(st.integers(0, 3))
    wide = [shape[d] + draw(st.sampled_from([0, 0, 1])) for d in order]
    flat, _ = _memory(dtype, (lead + prod(wide),))
    view = flat[lead * dtype.itemsize :].view(dtype).view(wide).permute([order.index(d) for d in range(len(shape))])
    return flat, view[tuple(slice(0, n) for n in shape)]


def assert_filled(laid: Mapping[str, torch.Tensor], expected: Mapping[str, Any]) -> None:
    """Assert that tensors hold just the bytes of the arrays of `expected`."""
    for name, values in expected.items():
        found = laid[name].reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
        np.testing.assert_array_equal(found, np.ascontiguousarray(values).reshape(-1).view(np.uint8), err_msg=name)


def assert_nothing_else_changed(laid: Laid) -> None:
    """Assert that the memory around the tensors is as it was; empties them."""
    for name, tensor in laid.tensors.items():
        size, flat = tensor.dtype.itemsize, laid.around[name]
        strides = (*(stride * size for stride in tensor.stride()), 1)
        flat.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size).fill_(POISON)
        assert bool((flat == POISON).all()), f"{name}: bytes beside it were written to"


def _kind(plan: Plan, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    spec = plan.parameters[name]
    return torch_dtype(spec.dtype), torch_shape(spec.dtype, spec.shape)


def _memory(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    flat = torch.full((prod(shape) * dtype.itemsize,), POISON, dtype=torch.uint8)
    return flat, flat.view(dtype).view(shape)
