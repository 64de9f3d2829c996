"""One process as any rank of a mesh: its DTensors have the parts of that rank, and nobody talks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["local", "mesh_seen_by", "spread"]


@contextmanager
def mesh_seen_by(rank: int, shape: Sequence[int]) -> Iterator[DeviceMesh]:
    """Yield a mesh of the CPU of that shape, as its rank `rank` has it."""
    size = torch.Size(shape).numel()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call] # meshes of other ranks are equal, and torch keeps the first
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "tp")[: len(shape)])
    finally:
        dist.destroy_process_group()


def spread(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], *, grad: bool = True) -> nn.Parameter:
    """Return this rank's part of a tensor that all ranks have, as a parameter."""
    return nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None), requires_grad=grad)


def local(tensor: Any) -> torch.Tensor:
    """Return a copy of what a rank has of a DTensor."""
    with torch.no_grad():
        found: torch.Tensor = tensor.to_local().clone()
    return found
