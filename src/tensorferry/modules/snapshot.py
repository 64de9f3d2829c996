"""The attributes of all modules of a model at one moment, and putting them back. Values of tensors are not kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorferry.modules.describe import tensors_of, walked_once

__all__ = ["Setting", "Snapshot", "attribute_tensors"]

_SIMPLE = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.Size)
_PLAIN = frozenset({dict, list, set})
_DEEPEST = 20
_OWN = frozenset(name for name, value in vars(nn.Module()).items() if type(value) in _PLAIN)
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


class _Saved(NamedTuple):
    """Attributes of one object, a copy of them, and copies of the plain containers among them."""

    attributes: dict[str, Any]
    copy: dict[str, Any]
    containers: list[tuple[Any, Any]]

    @classmethod
    def of(cls, holder: object) -> _Saved:
        attributes = vars(holder)
        containers = [(value, value.copy()) for value in attributes.values() if type(value) in _PLAIN]
        return cls(attributes, attributes.copy(), containers)

    @property
    def is_same(self) -> bool:
        """Whether nothing was set since; most modules are not written to, so this is asked before each attribute is."""
        return _is_equal(self.attributes, self.copy) and all(_is_equal(*pair) for pair in self.containers)

    def differs(self, name: str) -> bool:
        """Whether the attribute, which is there, is another object, or a container of others, than before."""
        value = self.attributes[name]
        if name not in self.copy or self.copy[name] is not value:
            return True
        return any(c is value and not _is_equal(c, items) for c, items in self.containers)

    def restore(self) -> None:
        for container, items in self.containers:
            if not _is_equal(container, items):
                _refill(container, items)
        if not _is_equal(self.attributes, self.copy):
            _refill(self.attributes, self.copy)


class Snapshot:
    """What hangs on the modules and on the parameters of a model: attributes, and plain containers among them.

    modules: all of them, with their first names and a dot.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = walked_once(model)
        self._saved = {module: _Saved.of(module) for _, module in self.modules}
        self._beside = [_Saved.of(tensor) for tensor in tensors_of(model)]

    def restore(self) -> None:
        """Put every attribute back to the object that it was."""
        for saved in (*self._saved.values(), *self._beside):
            saved.restore()

    def settings(self) -> tuple[Setting, ...]:
        """Return the numbers, strings and the like, and plain containers of such, that modules have got since."""
        return tuple(
            Setting(path[:-1], name, _copied(value), saved.copy.get(name) is value)
            for path, module in self.modules
            if not (saved := self._saved[module]).is_same
            for name, value in saved.attributes.items()
            if name not in _OWN and saved.differs(name) and _is_simple(value)
        )


def _is_equal(container: Any, items: Any) -> bool:
    """Whether a container has the same objects as its copy, in the same order where it has one."""
    if len(container) != len(items):
        return False
    if isinstance(container, set):
        return bool(container == items)
    if isinstance(container, dict) and not all(map(is_, container.values(), items.values())):
        return False
    return all(map(is_, container, items))


def attribute_tensors(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that hangs on one of `modules` in any way, in plain containers too, with a name.

    modules: with the names that those of their tensors begin with.
    """
    for prefix, module in modules:
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                if value.layout is torch.strided:
                    yield prefix + attribute, value
            elif type(value) in _PLAIN and value:
                registered = attribute in ("_parameters", "_buffers")
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if isinstance(item, torch.Tensor) and item.layout is torch.strided:
                        yield prefix + (str(key) if registered else f"{attribute}[{key}]"), item


def _is_simple(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether a value is such that a loader which had tensors with values would have set the same."""
    if type(value) in (tuple, frozenset, list, set, dict):
        inner = chain(value, value.values()) if isinstance(value, dict) else value
        return depth > 0 and all(_is_simple(item, depth - 1) for item in inner)
    return value is None or (isinstance(value, _SIMPLE) and value != "meta")  # what stand-ins say of their device


def _copied(value: Any) -> Any:
    return deepcopy(value) if type(value) in _PLAIN else value


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(items)
