"""Tensors whose values lie in tensors of their own: DTensors, of which a part is here, and others, which are refused.

What torch.distributed does is known here alone, and not imported: where nobody has, there are no DTensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from operator import add
from typing import Any

import torch
from torch import nn

from tensorferry.core.boxes import Box
from tensorferry.errors import PlanError

__all__ = [
    "ORDINARY",
    "around",
    "box_of",
    "device_of_mesh",
    "dtensor_class",
    "is_dtensor",
    "is_fsdp",
    "is_wrapper",
    "memory_of",
    "refuse_wrapper",
    "reshard",
    "spec_of",
]

ORDINARY = frozenset({nn.Parameter, torch.Tensor})
"""Classes of tensors of which nothing has to be asked; asking whether one is a parameter takes torch a while."""

_NO_DISPATCH = torch.Tensor.__torch_dispatch__
"""What classes have that leave operations to torch; their tensors have memory, and need not be looked at further."""
_BOXES = {"Shard", "_StridedShard", "Replicate"}
"""Placements under which a rank has some of the elements, as they are. By name: a subclass may deal them otherwise."""


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor lie in others: its class says what operations do to it, and it has no memory.

    Of one on meta, which would have none anyway, it is told by what its class says of the tensors in it.
    """
    if type(tensor).__torch_dispatch__ is _NO_DISPATCH:
        return False
    if tensor.is_meta:
        return hasattr(type(tensor), "__tensor_flatten__")
    try:
        return tensor.numel() > 0 and tensor.data_ptr() == 0
    except RuntimeError:  # that is what some classes say when they are asked for an address
        return True


def dtensor_class() -> type[torch.Tensor] | None:
    """Return torch's class of DTensors, None where nobody has imported it."""
    found: type[torch.Tensor] | None = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return found


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is a DTensor: of the shape of the whole, with the memory of a part."""
    kind = dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in whose memory the values lie that are here: the local part of a DTensor, or `tensor`."""
    if type(tensor).__torch_dispatch__ is _NO_DISPATCH or not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined] # to_local() makes another one each time
    return local


def spec_of(tensor: torch.Tensor) -> Any:  # of a class that torch keeps to itself
    """Return how a DTensor lies on the ranks; equal for equal shape, type, mesh and placements."""
    return tensor._spec  # type: ignore[attr-defined]


def around(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a DTensor whose local part is `local`, with the class, placements and attributes of the DTensor `like`.

    It aliases `local`, and needs a gradient if `like` does.
    """
    kind: Any = type(like)  # FSDP makes its parameters by this constructor, too
    made: torch.Tensor = kind(local, spec_of(like), requires_grad=like.requires_grad)
    vars(made).update(vars(like))
    return made


def box_of(name: str, tensor: torch.Tensor) -> Box | None:
    """Return which elements of a DTensor are here, as torch counts them; None on a rank that is not in its mesh.

    name: for messages. Raises PlanError where they are no box of the whole, or cannot be loaded.
    """
    _refuse_other_placements(name, tensor)
    local = memory_of(tensor)
    refuse_wrapper(f"the local part of {name}", local)
    coordinate: list[int] | None = spec_of(tensor).mesh.get_coordinate()
    if coordinate is None:
        return None
    _refuse_scattered(name, tensor, coordinate)
    with torch.device("cpu"):  # torch computes it with tensors, which a caller may want elsewhere by default
        chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    if [tuple(chunk.sizes) for chunk in chunks] != [tuple(local.shape)]:
        raise PlanError(
            f"{_said(name, tensor)} give this rank {[list(chunk.sizes) for chunk in chunks]} of {list(tensor.shape)}, "
            f"and it holds {list(local.shape)}: make it with distribute_tensor, or load before it is distributed"
        )
    start = tuple(chunks[0].offsets)
    return Box(start, tuple(map(add, start, local.shape)))


def refuse_wrapper(name: str, tensor: torch.Tensor) -> None:
    """Raise PlanError for a tensor whose values lie in others, as its class alone knows how."""
    if is_wrapper(tensor):
        kind = type(tensor).__name__
        raise PlanError(
            f"{name} is a {kind}, which keeps its values in other tensors and has no memory to fill: load the "
            f"checkpoint into an ordinary parameter, and make a {kind} of that afterwards"
        )


def device_of_mesh(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device that the mesh of the first DTensor on meta among `tensors` gives a rank, None for the CPU."""
    for tensor in tensors if dtensor_class() is not None else ():
        if type(tensor) not in ORDINARY and is_dtensor(tensor) and tensor.is_meta:
            kind: str = spec_of(tensor).mesh.device_type
            return None if kind in ("cpu", "meta") else torch.device(kind, _current(kind))
    return None


def is_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 looks after parameters of `module`: `fully_shard` was called with it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def reshard(model: nn.Module) -> None:
    """Have FSDP2 hang the parts that ranks keep, where whole parameters may hang since a forward pass.

    Those are copies for one pass, so that what is written to them is lost. ``state_dict()`` does the same.
    """
    if "torch.distributed.fsdp" in sys.modules:
        for module in model.modules():
            if is_fsdp(module):
                module.reshard()  # type: ignore[operator]


def _current(kind: str) -> int:
    found: int = torch.get_device_module(kind).current_device()
    return found


def _said(name: str, tensor: torch.Tensor) -> str:
    return f"{name} is a DTensor whose placements {tuple(spec_of(tensor).placements)}"


def _refuse_other_placements(name: str, tensor: torch.Tensor) -> None:
    placements = spec_of(tensor).placements
    if any(placement.is_partial() for placement in placements):
        raise PlanError(
            f"{_said(name, tensor)} have each rank hold a summand, and no checkpoint says which: redistribute it to "
            "Replicate() or Shard(dim) before loading"
        )
    if {type(placement).__name__ for placement in placements} - _BOXES:
        raise PlanError(
            f"{_said(name, tensor)} are not all known here: distribute it by Shard(dim) and Replicate(), or load before"
            " it is distributed"
        )


def _refuse_scattered(name: str, tensor: torch.Tensor, coordinate: list[int]) -> None:
    """Raise PlanError where what this rank has does not lie side by side in the whole; torch tells its beginning only.

    Dealing a dimension to the axes of the mesh in their order leaves it side by side, in another order it may not.
    """
    spec = spec_of(tensor)
    order = getattr(spec, "shard_order", None) or ()
    scattered = any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order)
    for dim in {p.dim for p in spec.placements if hasattr(p, "split_factor")}:
        at = torch.arange(spec.shape[dim], device="cpu")
        for placement, count, index in zip(spec.placements, spec.mesh.shape, coordinate, strict=True):
            if getattr(placement, "dim", None) == dim:
                at = _dealt(at, count, index, getattr(placement, "split_factor", 1))
        scattered = scattered or (len(at) > 0 and int(at[-1] - at[0]) + 1 != len(at))
    if scattered:
        raise PlanError(
            f"{_said(name, tensor)} give this rank elements that are no box of {list(tensor.shape)}: redistribute it "
            "to Shard(dim) before loading, or shard it along another dimension"
        )


def _dealt(at: torch.Tensor, count: int, index: int, factor: int) -> torch.Tensor:
    """Return what number `index` of `count` gets of the positions `at`: its part of each of `factor` pieces."""
    dealt = [piece.chunk(count) for piece in at.chunk(factor)]
    mine = [parts[index] for parts in dealt if index < len(parts)]
    return torch.cat(mine) if mine else at[:0]
