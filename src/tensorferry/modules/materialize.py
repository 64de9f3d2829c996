"""Giving memory to tensors of a module when their first bytes come, and not before."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tensorferry.core.target import Target, owner_of
from tensorferry.modules.describe import Place, identity_of, places

__all__ = ["Materialized"]

_REGISTERED = {"_parameters", "_buffers", "_modules"}
_Holder = tuple[Any, Any]  # a list or dict, and the index or key at which a tensor is kept in it


class Materialized(Mapping[str, torch.Tensor]):
    """The tensors of `model` by the names of `target`, ties left out; looking one up gives it memory.

    A tensor on meta is replaced, in every place where it hangs and in attributes, lists and dicts in which modules
    keep it besides, by an uninitialized one on `device`, of the same class and with the same attributes. Names that
    `target` ties share their values afterwards; names that it does not tie do not, even if the model shared them;
    `given_memory` has the names that got new memory. What comes back aliases the parameter and needs no gradient.
    May be used from several threads.
    """

    def __init__(self, model: nn.Module, target: Target, device: torch.device | str | None = None) -> None:
        self._device = torch.device(device or "cpu")
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._places: dict[str, list[Place]] = defaultdict(list)
        self._ready: dict[str, torch.Tensor] = {}
        self.given_memory: set[str] = set()
        self.touched = False
        """Whether any tensor was looked up, and so may have been written to."""
        for place in places(model):
            if place.name in target:
                self._places[owner_of(target, place.name)].append(place)
        self._names = list(self._places)
        owners: dict[object, str] = {}
        for owner, hanging in self._places.items():
            hanging.sort(key=lambda p: p.name != owner)
            owners.setdefault(identity_of(hanging[0].tensor), owner)
        self._shares = {o for o, p in self._places.items() if owners[identity_of(p[0].tensor)] != o}
        self._kept = _kept_besides(model, {id(p.tensor) for hanging in self._places.values() for p in hanging})

    def __getitem__(self, name: str) -> torch.Tensor:
        with self._lock:
            if name not in self._ready:
                self._ready[name] = self._materialize(name)
                self.touched = True
            return self._ready[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def device_of(self, name: str) -> torch.device:
        """Return where a tensor is, or will be when it is looked up."""
        tensor = self._places[name][0].tensor
        return self._device if tensor.device.type == "meta" else tensor.device

    def release(self, name: str) -> None:
        """Let go of a tensor that is whole: a module that replaces it then frees it. It cannot be looked up again."""
        with self._lock:
            self._ready.pop(name, None)
            self._places.pop(name, None)

    def _materialize(self, name: str) -> torch.Tensor:
        if name not in self._places:
            raise KeyError(name)
        hanging = self._places[name]
        tensor = hanging[0].tensor
        if tensor.device.type == "meta" or name in self._shares:
            self.given_memory.add(name)
            tensor = _with_memory(tensor, self._device if tensor.device.type == "meta" else tensor.device)
        for place in hanging:
            if identity_of(place.tensor) != identity_of(tensor):
                _hang(place, tensor)
                if name not in self._shares:
                    for container, key in self._kept.pop(id(place.tensor), ()):
                        container[key] = tensor
        return tensor.detach()


def _with_memory(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor with the class, attributes and layout of `like`, on `device`."""
    # A parameter that is made in inference mode could never be trained; where we are called from is no wish for that.
    with torch.inference_mode(False):
        made: torch.Tensor = torch.empty_like(like.detach(), device=device)
        if isinstance(like, nn.Parameter):
            made = nn.Parameter(made, requires_grad=like.requires_grad)
    if type(like) is not type(made):
        made.__class__ = type(like)
    made.__dict__.update(like.__dict__)
    return made


def _hang(place: Place, tensor: torch.Tensor) -> None:
    if place.is_parameter:
        place.module._parameters[place.leaf] = tensor  # type: ignore[assignment]
    else:
        place.module._buffers[place.leaf] = tensor


def _kept_besides(model: nn.Module, wanted: set[int]) -> dict[int, list[_Holder]]:
    """Find where modules keep the `wanted` tensors (by id) besides registering them, as an nn.LSTM keeps a list."""
    found: dict[int, list[_Holder]] = defaultdict(list)
    for module in model.modules():
        for attribute, value in vars(module).items():
            if id(value) in wanted:
                found[id(value)].append((vars(module), attribute))
            for key, item in () if attribute in _REGISTERED else _items(value):
                if id(item) in wanted:
                    found[id(item)].append((value, key))
    return found


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if type(value) is list:
        return enumerate(value)
    return value.items() if type(value) is dict else ()
