"""Having parameters lie elsewhere in memory, while all that refers to them goes on referring to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tensorferry.core.target import Target, owner_of
from tensorferry.modules.describe import Place, places, seen_as_plain
from tensorferry.modules.distributed import memory_of

__all__ = ["movable", "move", "realigned"]

_SOLE = 2
"""Users of a storage that one tensor has: the tensor, and the storage that is asked."""


def movable(model: nn.Module, target: Target) -> dict[str, torch.Tensor]:
    """Return, by the names of `target`, ties left out, the tensors of `model` that `move` can give other memory.

    They lie on the CPU as they do in files, and nothing else uses their memory: no view of it is kept anywhere.
    """
    found: dict[str, list[Place]] = {}
    for place in places(model):
        if (wanted := target.get(place.name)) is not None:
            owner = place.name if wanted.alias_of is None else owner_of(target, place.name)
            found.setdefault(owner, []).append(place)
    return {
        name: hanging[0].tensor
        for name, hanging in found.items()
        if all(place.tensor is hanging[0].tensor for place in hanging) and _is_movable(hanging[0].tensor)
    }


def move(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Have a tensor that is `movable` lie where `memory` does, which is like it; its values are those."""
    tensor.data = memory


def realigned(model: nn.Module, is_odd: Callable[[int], bool]) -> None:
    """Copy those tensors of `model` of which `is_odd` says so of their address, unless others use their memory, too."""
    for tensor in {id(place.tensor): place.tensor for place in places(model)}.values():
        if _is_movable(tensor) and is_odd(tensor.data_ptr()):
            move(tensor, tensor.detach().clone())


def _is_sole_user(tensor: torch.Tensor) -> bool:
    """Whether nothing but `tensor` uses its memory; False where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return False
    storage = tensor.untyped_storage()
    return bool(count(storage._cdata) == _SOLE)


def _is_movable(tensor: torch.Tensor) -> bool:
    if memory_of(tensor) is not tensor:
        return False
    with seen_as_plain():
        return (
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.is_inference()
            and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
            and _is_sole_user(tensor)
        )
