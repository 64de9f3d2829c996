"""What happens to a module after its bytes have come: its own post-processing, derived buffers, the last checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn

from tensorferry.core.amounts import few
from tensorferry.core.names import fold
from tensorferry.core.target import Target, owner_of
from tensorferry.errors import FinalizeError
from tensorferry.modules.describe import offers, places, tensors_of, walked
from tensorferry.modules.processed import noting_changes
from tensorferry.numerics.memory import return_free_memory

__all__ = ["Completion", "DerivesBuffers", "PostProcesses", "derive_buffers", "hooked_modules", "refuse_unfilled"]

_RETURNED = 32 << 20  # bytes of parameters that hooks may have replaced, after which their memory is handed back


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

    Children come before their parents, and a module that hangs in several places is run once. A module's
    `quant_method`, where it has one, comes after the module's own. Tensors that a hook makes without saying where
    are made on the module's device, and a parameter that takes the place of another keeps the attributes that were
    set on that one. Modules that wait for nothing are run by `finish`, or before the first parent that is run.

    expected: the tensors to wait for. done: modules that have been run before. then: called with each that was run.
    """

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        expected: set[str],
        *,
        done: Iterable[str] = (),
        then: Callable[[nn.Module], None] = lambda module: None,
    ) -> None:
        self._then = then
        self._waiting: dict[str, set[str]] = {}
        self._users: dict[str, list[str]] = defaultdict(list)
        self._modules = hooked_modules(model)
        self._inside: dict[str, list[str]] = {}
        self._processed: dict[str, None] = dict.fromkeys(done)
        self._freed = 0
        names = {id(module): name for name, module in self._modules.items()}
        for name, module in self._modules.items():
            inner = (id(m) for _, m in _children_first(module) if m is not module)
            self._inside[name] = [names[i] for i in inner if i in names]
            self._waiting[name] = {owner_of(target, tensor) for tensor in _names_in(name, module)} & expected
            for tensor in self._waiting[name]:
                self._users[tensor].append(name)

    @property
    def processed(self) -> tuple[str, ...]:
        """The modules that were run, in that order; the root is ``""``."""
        return tuple(self._processed)

    def ready(self, tensor: str) -> None:
        """Note that `tensor` is whole, and run the modules that waited for nothing else."""
        for name in self._users.get(tensor, ()):
            self._waiting[name].discard(tensor)
            if not self._waiting[name]:
                self._run(name)

    def finish(self) -> None:
        """Run the modules that have not been run, children first."""
        for name in self._modules:
            self._run(name)

    def _run(self, name: str) -> None:
        if name in self._processed:
            return
        for inner in self._inside[name]:
            self._run(inner)
        self._processed[name] = None
        module = self._modules[name]
        self._freed += sum(p.nbytes for p in module.parameters(recurse=False) if p.device.type == "cpu")
        try:
            with _keeping_attributes(module), noting_changes(module), _on_its_device(module):
                for hook in _hooks(module):
                    hook()
        except Exception as error:
            error.add_note(f"while post-processing the module {name or '(root)'!r} after loading its weights")
            raise
        self._then(module)
        if self._freed >= _RETURNED:
            self._freed = 0
            return_free_memory()


def hooked_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that post-process their weights, or whose `quant_method` does, by name, children first."""
    return {name: module for name, module in _children_first(model) if _hooks(module)}


def _names_in(prefix: str, module: nn.Module) -> list[str]:
    dot = prefix + "." if prefix else ""
    return [dot + place.name for place in places(module)]


def _children_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module once, after its children, by its first name in module order."""
    found: dict[nn.Module, str] = {}
    _after_children("", model, set(), found)
    return [(name, module) for module, name in found.items()]


def _after_children(prefix: str, module: nn.Module, seen: set[nn.Module], found: dict[nn.Module, str]) -> None:
    # No closure that calls itself: it would keep the model in memory until the garbage collector comes.
    seen.add(module)
    for name, child in module.named_children() if module._modules else ():
        if child not in seen:
            _after_children(f"{prefix}.{name}" if prefix else name, child, seen, found)
    found[module] = prefix


def _post_processes(module: nn.Module) -> TypeGuard[PostProcesses]:
    return offers(module, "process_weights_after_loading")


def _hooks(module: nn.Module) -> list[Callable[[], object]]:
    hooks: list[Callable[[], object]] = []
    if _post_processes(module):
        hooks.append(module.process_weights_after_loading)
    method = _quant_method(module)
    process = getattr(method, "process_weights_after_loading", None)
    if callable(process):
        hooks.append(lambda: process(module))
    return hooks


def _quant_method(module: nn.Module) -> object:
    told = offers(module, "quant_method") or "quant_method" in module._modules
    if not told and type(module).__getattr__ is nn.Module.__getattr__:
        return None  # which getattr would say, too, after making an error for each of tens of thousands of modules
    return getattr(module, "quant_method", None)


@contextmanager
def _keeping_attributes(module: nn.Module) -> Iterator[None]:
    """Give what was set on a parameter to the one that takes its place inside, unless that says otherwise."""
    # The attributes alone: a tensor that is held here would not be freed when the hook replaces it.
    before = [(p.module, p.leaf, vars(p.tensor)) for p in places(module) if vars(p.tensor)]
    yield
    for holder, leaf, attributes in before:
        new: torch.Tensor | None = holder._parameters.get(leaf, holder._buffers.get(leaf))
        if new is not None and vars(new) is not attributes:
            vars(new).update({key: value for key, value in attributes.items() if key not in vars(new)})


def _on_its_device(module: nn.Module) -> AbstractContextManager[object]:
    found = next((p.tensor.device for p in places(module) if p.tensor.device.type != "meta"), None)
    return nullcontext() if found is None else found


def _derives_buffers(module: nn.Module) -> TypeGuard[DerivesBuffers]:
    return offers(module, "derive_buffers")


def derive_buffers(model: nn.Module, device: torch.device) -> list[str]:
    """Let modules compute their non-persistent buffers that are on meta; return the names of those computed.

    Raises FinalizeError naming buffers of modules that do not say how: see `DerivesBuffers`.
    """
    if not any(module._non_persistent_buffers_set for _, module in walked(model)):
        return []
    empty = [p for p in places(model) if not p.persistent and p.tensor.is_meta]
    modules = {id(p.module): p.module for p in empty}
    for module in modules.values():
        if _derives_buffers(module):
            module.derive_buffers(device)
    left = [p.name for p in places(model) if not p.persistent and p.tensor.is_meta]
    if left:
        names = few((f.text for f in fold(left)), 8)
        raise FinalizeError(
            f"no checkpoint holds the non-persistent buffers {names}, and their modules do not say how to compute "
            "them: give the modules a derive_buffers(device) method, or build the model on a real device"
        )
    return [p.name for p in empty]


def refuse_unfilled(model: nn.Module, unfilled: Mapping[str, str]) -> None:
    """Raise FinalizeError where a tensor is still on meta, or was given memory and no values.

    unfilled: names that got memory from us and not all of their values, with the reason of each.
    """
    if unfilled or any(tensor.is_meta for tensor in tensors_of(model)):
        meta = [p.name for p in places(model) if p.tensor.is_meta]
        names = few((f.text for f in fold([*meta, *unfilled])), 8)
        raise FinalizeError(
            f"nothing filled {names}: the checkpoint does not hold them and the model does not compute them; "
            "give them values, or build the model on a real device and allow them to be missing"
        )
