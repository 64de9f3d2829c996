"""Modules that post-process their weights, laid out again as they were before, and given back the tensors that they had
with what post-processing makes anew in them: who refers to those, an optimizer or a captured graph, goes on doing so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tensorferry.modules.describe import Place, places
from tensorferry.modules.distributed import memory_of
from tensorferry.modules.finalize import hooked_modules
from tensorferry.modules.materialize import dressed
from tensorferry.modules.processed import changes_of, lay_out
from tensorferry.modules.snapshot import Snapshot
from tensorferry.numerics.casts import writing

__all__ = ["Aside", "overwrite"]

_Registry = dict[str, Any]  # the parameters or the buffers of a module, or its other attributes


class Aside:
    """The tensors of the modules of `model` that post-process, and of those inside them, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooked = hooked_modules(model)
        self._snapshot = Snapshot(model)
        self._kept: dict[int, list[tuple[_Registry, str, torch.Tensor]]] = {}
        for module in self._inside():
            self._kept[id(module)] = list(_tensors(module))
        self.devices = self._devices()
        """Where tensors were, by name, and so where those that take their place belong."""
        self.renewed: set[str] = set()
        """Names of tensors that post-processing has made in another form than before, so that they are new ones."""

    def __bool__(self) -> bool:
        """Whether any module post-processes."""
        return bool(self._hooked)

    def lay_out(self) -> set[str]:
        """Give the modules the tensors that they had before post-processing, where these had another type or shape.

        Those are on meta. Returns their names. What post-processing added goes.
        """
        there = {place.name: place for place in places(self._model)}
        changes = changes_of(self._model)
        wanted = {name: (spec, _is_buffer(there.get(name))) for name, spec in changes.items() if spec is not None}
        lay_out(self._model, wanted, {}, [name for name, spec in changes.items() if spec is None], ())
        for name in wanted:
            beside = name.rpartition(".")[0]
            known = self.devices.get(name) or next((d for n, d in self.devices.items() if n.startswith(beside)), None)
            if known is not None:
                self.devices[name] = known
        return set(wanted)

    def hang_empty(self, names: set[str]) -> None:
        """Put a tensor on meta in the place of each of `names` that hangs in a module that post-processes, or below.

        One that hangs in other modules, too, is replaced there, too.
        """
        inside = {id(place.tensor) for module in self._hooked.values() for place in places(module)}
        empty: dict[int, torch.Tensor] = {}
        for place in list(places(self._model)):
            if id(place.tensor) in inside and place.name in names and not place.tensor.is_meta:
                twin = empty.setdefault(id(place.tensor), _on_meta(place.tensor))
                self._kept.setdefault(id(place.module), list(_tensors(place.module)))
                _registry(place)[place.leaf] = twin

    def put_back(self, root: nn.Module | None = None) -> None:
        """Have the tensors that modules had take the values of those that took their place, and hang them there again.

        root: only in it and the modules inside it. Doing it again changes nothing.
        """
        for prefix, module in (self._model if root is None else root).named_modules():
            for registry, key, old in self._kept.get(id(module), ()):
                new = registry.get(key)
                if new is old or not isinstance(new, torch.Tensor) or new.is_meta:
                    continue
                if _form(new) != _form(old):
                    self.renewed.add(f"{prefix}.{key}" if prefix else key)
                    continue
                overwrite(old, new)
                registry[key] = old

    def restore(self) -> None:
        """Hang everything where it was, and set every attribute of modules back; values are not looked at."""
        self._snapshot.restore()

    def _devices(self) -> dict[str, torch.device]:
        return {p.name: p.tensor.device for p in places(self._model) if not p.tensor.is_meta} if self._hooked else {}

    def _inside(self) -> Iterator[nn.Module]:
        for module in self._hooked.values():
            yield from module.modules()


def overwrite(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give `old` the values of `new`, of the same type and shape, where it lies; of DTensors, this rank's part."""
    old, new = memory_of(old), memory_of(new)
    if old.data_ptr() != new.data_ptr():
        old = old.detach()
        with writing(old):
            old.copy_(new)


def _tensors(module: nn.Module) -> Iterator[tuple[_Registry, str, torch.Tensor]]:
    for registry in (module._parameters, module._buffers, vars(module)):
        for key, value in registry.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                yield registry, key, value


def _registry(place: Place) -> _Registry:
    found: _Registry = place.module._parameters if place.is_parameter else place.module._buffers
    return found


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory, with the class, attributes and layout of `tensor`."""
    return dressed(torch.empty_like(memory_of(tensor).detach(), device="meta"), tensor)


def _is_buffer(place: Place | None) -> bool:
    return place is not None and not place.is_parameter


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tuple(memory_of(tensor).shape), tensor.device
