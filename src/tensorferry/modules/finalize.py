"""What happens to a module after its bytes have come: its own post-processing, derived buffers, the last checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from tensorferry.core.names import fold
from tensorferry.core.target import Target
from tensorferry.errors import FinalizeError
from tensorferry.modules.describe import places

__all__ = ["Completion", "DerivesBuffers", "PostProcesses", "derive_buffers", "refuse_unfilled"]


@runtime_checkable
class PostProcesses(Protocol):
    """A module that repacks, quantizes or fuses its weights once they are all there."""

    def process_weights_after_loading(self) -> None: ...


@runtime_checkable
class DerivesBuffers(Protocol):
    """A module whose non-persistent buffers follow from its configuration: rotary tables, masks."""

    def derive_buffers(self, device: torch.device) -> None:
        """Set every non-persistent buffer of this module, not of its children, on `device`."""
        ...


class Completion:
    """Runs ``process_weights_after_loading`` of each module as soon as everything in it has been loaded.

    Children come before their parents. A module's `quant_method`, where it has one, comes after the module's own.
    Modules that wait for nothing are run by `finish`.
    """

    def __init__(self, model: nn.Module, target: Target, expected: set[str]) -> None:
        self._waiting: dict[str, set[str]] = {}
        self._users: dict[str, list[str]] = defaultdict(list)
        self._order = {name: module for name, module in _children_first(model) if _hooks(module)}
        self.processed: list[str] = []
        for name, module in self._order.items():
            inside = {_owner(target, tensor) for tensor in _names_in(name, module)} & expected
            self._waiting[name] = inside
            for tensor in inside:
                self._users[tensor].append(name)

    def ready(self, tensor: str) -> None:
        """Note that `tensor` is whole, and run the modules that waited for nothing else."""
        for name in self._users.get(tensor, ()):
            self._waiting[name].discard(tensor)
            if not self._waiting[name]:
                self._run(name)

    def finish(self) -> None:
        """Run the modules that have not been run, children first."""
        for name in self._order:
            self._run(name)

    def _run(self, name: str) -> None:
        if name in self.processed:
            return
        self.processed.append(name)
        try:
            for hook in _hooks(self._order[name]):
                hook()
        except Exception as error:
            error.add_note(f"while post-processing the module {name or '(root)'!r} after loading its weights")
            raise


def _names_in(prefix: str, module: nn.Module) -> list[str]:
    dot = prefix + "." if prefix else ""
    return [dot + place.name for place in places(module)]


def _children_first(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    out: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        out += _children_first(child, f"{prefix}.{name}" if prefix else name)
    return [*out, (prefix, model)]


def _hooks(module: nn.Module) -> list[Callable[[], object]]:
    hooks: list[Callable[[], object]] = []
    if isinstance(module, PostProcesses):
        hooks.append(module.process_weights_after_loading)
    method = getattr(module, "quant_method", None)
    process = getattr(method, "process_weights_after_loading", None)
    if callable(process):
        hooks.append(lambda: process(module))
    return hooks


def _owner(target: Target, name: str) -> str:
    tensor = target.get(name)
    return (tensor.alias_of if tensor is not None else None) or name


def derive_buffers(model: nn.Module, device: torch.device) -> list[str]:
    """Let modules compute their non-persistent buffers that are on meta; return the names of those computed.

    Raises FinalizeError naming buffers of modules that do not say how: see `DerivesBuffers`.
    """
    empty = [p for p in places(model) if not p.persistent and p.tensor.device.type == "meta"]
    modules = {id(p.module): p.module for p in empty}
    for module in modules.values():
        if isinstance(module, DerivesBuffers):
            module.derive_buffers(device)
    left = [p.name for p in places(model) if not p.persistent and p.tensor.device.type == "meta"]
    if left:
        names = ", ".join(f.text for f in fold(left)[:8])
        raise FinalizeError(
            f"no checkpoint holds the non-persistent buffers {names}, and their modules do not say how to compute "
            "them: give the modules a derive_buffers(device) method, or build the model on a real device"
        )
    return [p.name for p in empty]


def refuse_unfilled(model: nn.Module, unfilled: Mapping[str, str]) -> None:
    """Raise FinalizeError where a tensor is still on meta, or was given memory and no values.

    unfilled: names that got memory from us and not all of their values, with the reason of each.
    """
    meta = [p.name for p in places(model) if p.tensor.device.type == "meta"]
    if meta or unfilled:
        names = ", ".join(f.text for f in fold([*meta, *unfilled])[:8])
        raise FinalizeError(
            f"nothing filled {names}: the checkpoint does not hold them and the model does not compute them; "
            "give them values, or build the model on a real device and allow them to be missing"
        )
