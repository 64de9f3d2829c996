"""One process as any rank of a mesh: its DTensors have the parts of that rank, and nobody talks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.checkpoints import write_safetensors

__all__ = ["One", "checkpoint", "local", "mesh_seen_by", "spread"]


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


class One(nn.Module):
    """A module with the tensors that it is given."""

    weight: Any  # nn.Module says that attributes may be modules
    other: Any
    scale: Any

    def __init__(self, weight: torch.Tensor, **more: torch.Tensor) -> None:
        super().__init__()
        self.register_parameter("weight", nn.Parameter(weight) if type(weight) is torch.Tensor else weight)  # type: ignore[arg-type]
        for name, tensor in more.items():
            self.register_parameter(name, tensor)  # type: ignore[arg-type]


def checkpoint(folder: Path, **tensors: torch.Tensor) -> Path:
    """Write a checkpoint of those tensors, and return its folder."""
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
