"""Giving memory to tensors of a module when their first bytes come, and not before."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tensorferry.core.target import Target
from tensorferry.errors import PlanError
from tensorferry.modules.describe import ORDINARY, Place, identity_of, places_by_owner
from tensorferry.modules.distributed import around, is_dtensor, is_fsdp, memory_of
from tensorferry.numerics.memory import empty_at

__all__ = ["LARGE", "Materialized", "dressed"]

_ALIGNED = 64
"""What addresses are multiples of: on others, products of bfloat16 matrices took a tenth longer."""
LARGE = 1 << 20
"""Bytes of tensors from which on it matters where they lie in memory."""
_REGISTERED = {"_parameters", "_buffers", "_modules"}
_CONTAINERS = {list, dict}
_Holder = tuple[Any, Any]  # a list or dict, and the index or key at which a tensor is kept in it


class Materialized(Mapping[str, torch.Tensor]):
    """The tensors of `model` by the names of `target`, ties left out; looking one up gives it memory.

    A tensor on meta is replaced, in every place where it hangs and in attributes, lists and dicts in which modules
    keep it besides, by an uninitialized one on `device`, of the same class and with the same attributes. Of a DTensor,
    it is the local part that has memory and comes back. Names that `target` ties share their values afterwards; names
    that it does not tie do not, even if the model shared them; `given_memory` has the names that got new memory. What
    comes back aliases the parameter and needs no gradient. May be used from several threads.

    beginnings: where in a file the first byte of a tensor lies, for those that may be read directly from there. Large
    ones get an address that is equal to it modulo the size of a page, where no computation suffers from that: where it
    is a multiple of 64. huge_pages: ask for huge pages for large tensors. Both are for the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        device: torch.device | str | None = None,
        *,
        beginnings: Mapping[str, int] | None = None,
        huge_pages: bool = False,
    ) -> None:
        self._beginnings = beginnings or {}
        self._huge_pages = huge_pages
        self._device = torch.device(device or "cpu")
        self._lock = threading.Lock()
        self._places = places_by_owner(model, target)
        self._ready: dict[str, torch.Tensor] = {}
        self.given_memory: set[str] = set()
        self.touched = False
        """Whether any tensor was looked up, and so may have been written to."""
        self._names = list(self._places)
        owners: dict[object, str] = {}
        self._shares: set[str] = set()
        for owner, hanging in self._places.items():
            if len(hanging) > 1:
                hanging.sort(key=lambda p: p.name != owner)
            if owners.setdefault(identity_of(hanging[0].tensor), owner) != owner:
                self._shares.add(owner)
        _refuse_untied_by_fsdp(model, self._shares, self._places)
        replaced = (h for h in self._places.values() if len(h) > 1 or h[0].tensor.is_meta)
        self._kept = _kept_besides(model, {id(p.tensor) for hanging in replaced for p in hanging})

    def __getitem__(self, name: str) -> torch.Tensor:
        with self._lock:
            tensor = self._ready.get(name)
            if tensor is None:
                tensor = self._ready[name] = self._materialize(name)
                self.touched = True
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def device_of(self, name: str) -> torch.device:
        """Return where a tensor is, or will be when it is looked up."""
        tensor = self._places[name][0].tensor
        return self._device if tensor.is_meta else tensor.device

    @property
    def hanging(self) -> dict[str, torch.Tensor]:
        """The tensors as they hang in the model before they are looked up; of DTensors, the local parts."""
        return {
            name: tensor if type(tensor := hanging[0].tensor) in ORDINARY else memory_of(tensor)
            for name, hanging in self._places.items()
        }

    @property
    def replaceable(self) -> set[str]:
        """Names of the tensors without memory that `adopt` takes another one for: on meta, contiguous, for the CPU."""
        tensors = self.hanging.items() if self._device.type == "cpu" else ()
        return {n for n, t in tensors if t.is_meta and t.is_contiguous() and n not in self._shares}

    def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hang tensors that are whole, such as views of mapped files, in the places of those that are `replaceable`."""
        with self._lock:
            for name, tensor in tensors.items():
                self._ready[name] = self._hung(name, dressed(tensor, self._places[name][0].tensor))
                self.touched = True

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
        if tensor.is_meta or name in self._shares:
            self.given_memory.add(name)
            tensor = self._with_memory(name, tensor, self._device if tensor.is_meta else tensor.device)
        return self._hung(name, tensor)

    def _with_memory(self, name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor with the class, attributes and layout of `like`, on `device`."""
        old = like if type(like) in ORDINARY else memory_of(like)
        begin = self._beginnings.get(name, -1)
        suits = begin % _ALIGNED == 0
        if device.type == "cpu" and old.nbytes >= LARGE and old.is_contiguous() and (suits or self._huge_pages):
            return dressed(empty_at(begin if suits else 0, tuple(old.shape), old.dtype, self._huge_pages), like)
        with _outside_inference():
            if type(old) in ORDINARY and old.is_contiguous():  # for tensors on meta, empty_like is slow
                made = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
            else:
                made = torch.empty_like(old.detach(), device=device)
            return dressed(made, like)

    def _hung(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        for place in self._places[name]:
            hung = place.tensor
            if hung is not tensor and (hung.is_meta or identity_of(hung) != identity_of(tensor)):
                _hang(place, tensor)
                if name not in self._shares:
                    for container, key in self._kept.pop(id(hung), ()):
                        container[key] = tensor
        return (tensor if type(tensor) in ORDINARY else memory_of(tensor)).detach()


def dressed(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `made` with the class and attributes of `like`; of a DTensor, `made` becomes the local part."""
    if type(like) not in ORDINARY and is_dtensor(like):
        with _outside_inference():
            return around(made, like)
    if type(like) is nn.Parameter or isinstance(like, nn.Parameter):
        with _outside_inference():
            made = nn.Parameter(made, requires_grad=like.requires_grad)
    if type(like) is not type(made):
        made.__class__ = type(like)
    if attributes := like.__dict__:
        made.__dict__.update(attributes)
    return made


def _outside_inference() -> AbstractContextManager[object]:
    """Return the mode in which tensors are made that can be trained: where we are called from is no wish otherwise."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _refuse_untied_by_fsdp(model: nn.Module, names: set[str], hanging: Mapping[str, list[Place]]) -> None:
    """Raise PlanError where FSDP2 would tie again, in the next forward pass, what is to have values of its own."""
    apart = sorted(name for name in names if is_dtensor(hanging[name][0].tensor))
    if apart and any(map(is_fsdp, model.modules())):
        raise PlanError(
            f"{apart[0]} is tied to another parameter, and the checkpoint holds other values for it: FSDP keeps them "
            "tied, so untie them before fully_shard, or load a checkpoint in which they are equal"
        )


def _hang(place: Place, tensor: torch.Tensor) -> None:
    if place.is_parameter:
        place.module._parameters[place.leaf] = tensor  # type: ignore[assignment]
    else:
        place.module._buffers[place.leaf] = tensor


def _kept_besides(model: nn.Module, wanted: set[int]) -> dict[int, list[_Holder]]:
    """Find where modules keep the `wanted` tensors (by id) besides registering them, as an nn.LSTM keeps a list."""
    found: dict[int, list[_Holder]] = defaultdict(list)
    for module in model.modules() if wanted else ():
        for attribute, value in vars(module).items():
            if id(value) in wanted:
                found[id(value)].append((vars(module), attribute))
            elif type(value) in _CONTAINERS and value and attribute not in _REGISTERED:
                for key, item in enumerate(value) if type(value) is list else value.items():
                    if id(item) in wanted:
                        found[id(item)].append((value, key))
    return found
