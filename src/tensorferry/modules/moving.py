"""Having parameters lie elsewhere in memory, while all that refers to them goes on referring to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch
from torch import nn

from tensorferry.core.target import Target
from tensorferry.modules.describe import places_by_owner, seen_as_plain, tensors_of
from tensorferry.modules.distributed import memory_of

__all__ = ["movable", "move", "realigned"]


def movable(model: nn.Module, target: Target) -> dict[str, torch.Tensor]:
    """Return, by the names of `target`, ties left out, the tensors of `model` that `move` can give other memory.

    They lie on the CPU as they do in files, and nothing else uses their memory: no view of it is kept anywhere.
    """
    return {
        name: hanging[0].tensor
        for name, hanging in places_by_owner(model, target).items()
        if all(place.tensor is hanging[0].tensor for place in hanging) and _is_movable(hanging[0].tensor)
    }


def move(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Have a tensor that is `movable` lie where `memory` does, which is like it; its values are those."""
    tensor.data = memory


def realigned(model: nn.Module, is_odd: Callable[[int], bool]) -> None:
    """Copy those matrices of `model` of which `is_odd` says so of their address, unless others use their memory, too.

    Those for whose copy there is no room stay. So do vectors: kernels keep the addresses of scales, and of no matrix
    that they have not packed.
    """
    for tensor in {id(tensor): tensor for tensor in tensors_of(model)}.values():
        if not tensor.is_meta and is_odd(tensor.data_ptr()) and sum(n > 1 for n in tensor.shape) > 1:
            with torch.inference_mode(False), suppress(RuntimeError, MemoryError):
                if _is_movable(tensor):
                    move(tensor, tensor.detach().clone())


def _is_sole_user(tensor: torch.Tensor) -> bool:
    """Whether no other tensor uses the memory of `tensor`; False where torch does not tell."""
    of_one = _users_of_one()
    return of_one is not None and _users(tensor) == of_one


@cache
def _users_of_one() -> int | None:
    """Return how many users torch counts of the memory of one tensor; None where it does not, or not every one."""
    if not hasattr(torch._C, "_storage_Use_Count"):
        return None
    one = torch.empty(1, device="cpu")
    count = _users(one)
    view = one[:]
    return count if _users(one) == count + 1 == _users(view) else None


def _users(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


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
