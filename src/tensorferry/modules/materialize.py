"""Giving memory to tensors of a module when their first bytes come, and not before."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from tensorferry.core.target import Target
from tensorferry.modules.describe import Place, places

__all__ = ["Materialized"]


class Materialized(Mapping[str, torch.Tensor]):
    """The tensors of `model` by the names of `target`, ties left out; looking one up gives it memory.

    A tensor on meta is replaced, in every place where it hangs, by an uninitialized one on `device`, of the same
    class and with the same attributes. Names that `target` ties share one tensor afterwards; names that it does not
    tie do not, even if the model shared them; `given_memory` has the names that got new memory. What comes back
    aliases the parameter and needs no gradient. May be used from several threads.
    """

    def __init__(self, model: nn.Module, target: Target, device: torch.device | str | None = None) -> None:
        self._device = torch.device(device or "cpu")
        self._lock = threading.Lock()
        self._places: dict[str, list[Place]] = defaultdict(list)
        self._ready: dict[str, torch.Tensor] = {}
        self.given_memory: set[str] = set()
        for place in places(model):
            tensor = target.get(place.name)
            if tensor is not None:
                self._places[tensor.alias_of or place.name].append(place)
        owners: dict[int, str] = {}
        for owner, hanging in self._places.items():
            hanging.sort(key=lambda p: p.name != owner)
            owners.setdefault(id(hanging[0].tensor), owner)
        self._shares = {o for o, p in self._places.items() if owners[id(p[0].tensor)] != o}

    def __getitem__(self, name: str) -> torch.Tensor:
        with self._lock:
            if name not in self._ready:
                self._ready[name] = self._materialize(name)
            return self._ready[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def touched(self) -> bool:
        """Whether any tensor was looked up, and so may have been written to."""
        return bool(self._ready)

    def _materialize(self, name: str) -> torch.Tensor:
        hanging = self._places[name]
        tensor = hanging[0].tensor
        if tensor.device.type == "meta" or name in self._shares:
            self.given_memory.add(name)
            tensor = _with_memory(tensor, self._device if tensor.device.type == "meta" else tensor.device)
        for place in hanging:
            if place.tensor is not tensor:
                _hang(place, tensor)
        return tensor.detach()


def _with_memory(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor with the class, attributes and layout of `like`, on `device`."""
    data = torch.empty_like(like.detach(), device=device)
    if not isinstance(like, nn.Parameter):
        return data
    made = nn.Parameter(data, requires_grad=like.requires_grad)
    if type(like) is not nn.Parameter:
        made.__class__ = type(like)
    made.__dict__.update(like.__dict__)
    return made


def _hang(place: Place, tensor: torch.Tensor) -> None:
    if place.is_parameter:
        place.module._parameters[place.leaf] = tensor  # type: ignore[assignment]
    else:
        place.module._buffers[place.leaf] = tensor
