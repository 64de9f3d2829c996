"""The attributes of all modules of a model at one moment, and putting them back. Values of tensors are not kept."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any, TypeGuard

import torch
from torch import nn

from tensorferry.modules.describe import places

__all__ = ["Setting", "Snapshot", "attribute_tensors"]

_SIMPLE = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.Size)
_DEEPEST = 20
_OWN = frozenset(name for name, value in vars(nn.Module()).items() if type(value) in (dict, list, set))
"""Where every module keeps its parts, hooks and the like."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value without tensors in it that was set as `attribute` of the module that is called `module` from the root.

    is_same: whether it is a container that was there before, whose contents are others.
    """

    module: str
    attribute: str
    value: Any
    is_same: bool = False

    def put_on(self, model: nn.Module) -> None:
        """Set the attribute of that module of `model`, or fill the container that is there; raises what that raises."""
        module = model.get_submodule(self.module)
        held = vars(module).get(self.attribute)
        if self.is_same and type(held) is type(self.value):
            _refill(held, self.value)
        else:
            setattr(module, self.attribute, _copied(self.value))


class Snapshot:
    """What hangs on the modules and on the parameters of a model: attributes, and plain containers among them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        holders: list[object] = [*self._modules.values(), *(p.tensor for p in places(model))]
        self._saved = [
            (vars(holder), dict(vars(holder)), [(v, v.copy()) for v in vars(holder).values() if _is_plain(v)])
            for holder in holders
        ]

    def restore(self) -> None:
        """Put every attribute back to the object that it was."""
        for attributes, saved, containers in self._saved:
            for container, items in containers:
                _refill(container, items)
            if attributes.keys() != saved.keys() or any(attributes[k] is not v for k, v in saved.items()):
                attributes.clear()
                attributes.update(saved)

    def settings(self) -> tuple[Setting, ...]:
        """Return the numbers, strings and the like, and plain containers of such, that modules have got since."""
        return tuple(
            Setting(path, name, _copied(value), saved.get(name) is value)
            for (path, module), (_, saved, containers) in zip(self._modules.items(), self._saved, strict=False)
            for name, value in vars(module).items()
            if name not in _OWN and _differs(value, name, saved, containers) and _is_simple(value)
        )


def _differs(value: Any, name: str, saved: dict[str, Any], containers: list[tuple[Any, Any]]) -> bool:
    if name not in saved or saved[name] is not value:
        return True
    return any(c is value and not _is_equal(c, items) for c, items in containers)


def _is_equal(container: Any, items: Any) -> bool:
    """Whether a container has the same objects as its copy, in the same order where it has one."""
    if isinstance(container, set):
        return bool(container == items)
    if isinstance(container, dict) and not all(map(is_, container.values(), items.values())):
        return False
    return len(container) == len(items) and all(map(is_, container, items))


def attribute_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that hangs on a module in any way, in plain containers too, with a name."""
    for prefix, module in model.named_modules():
        dot = prefix + "." if prefix else ""
        for attribute, value in vars(module).items():
            if _has_memory(value):
                yield dot + attribute, value
            elif _is_plain(value):
                registered = attribute in ("_parameters", "_buffers")
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if _has_memory(item):
                        yield dot + (str(key) if registered else f"{attribute}[{key}]"), item


def _has_memory(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _is_plain(value: Any) -> bool:
    return type(value) in (dict, list, set)


def _is_simple(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether a value is such that a loader which had tensors with values would have set the same."""
    if type(value) in (tuple, frozenset, list, set, dict):
        inner = chain(value, value.values()) if isinstance(value, dict) else value
        return depth > 0 and all(_is_simple(item, depth - 1) for item in inner)
    return value is None or (isinstance(value, _SIMPLE) and value != "meta")  # what stand-ins say of their device


def _copied(value: Any) -> Any:
    return deepcopy(value) if _is_plain(value) else value


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(items)
