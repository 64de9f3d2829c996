"""The attributes of all modules of a model at one moment, and putting them back. Values of tensors are not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorferry.modules.describe import tensors_of, walked_once

__all__ = ["Change", "IsFixed", "Setting", "Snapshot", "attribute_tensors", "held_in"]

_SIMPLE = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.Size)
_PLAIN = frozenset({dict, list, set})
_COPIED = _PLAIN | {tuple, frozenset}
_DEEPEST = 20
_OWN = frozenset(name for name, value in vars(nn.Module()).items() if type(value) in _PLAIN)
"""Where every module keeps its parts, hooks and the like."""
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_NOTHING = object()

IsFixed = Callable[[torch.Tensor], bool]
"""Says whether a tensor has its values, and would have them in any other load."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that was set as `attribute` of the module that is called `module` from the root.

    Tensors in it have the same values in every load; they are set as they are, and not copied. A value of None may take
    the place of a module, a parameter or a buffer. is_same: whether it is a container that was there before, whose
    contents are others. is_gone: whether the attribute was deleted.
    """

    module: str
    attribute: str
    value: Any
    is_same: bool = False
    is_gone: bool = False

    def put_on(self, model: nn.Module) -> None:
        """Set the attribute of that module of `model`, or fill the container that is there; raises what that raises."""
        module = model.get_submodule(self.module)
        held = vars(module).get(self.attribute)
        if self.is_gone:
            with suppress(AttributeError):
                delattr(module, self.attribute)
        elif self.is_same and type(held) is type(self.value):
            _refill(held, _copied(self.value))
        else:
            setattr(module, self.attribute, _copied(self.value))


class Change(NamedTuple):
    """An attribute, module, parameter or buffer that was set or deleted.

    name: from the root. value: what is there now. after, before: what sets it as it is now, and as it was; None where
    nothing can.
    """

    name: str
    value: Any
    after: Setting | None
    before: Setting | None


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

    def changes(self, path: str, is_fixed: IsFixed) -> Iterator[Change]:
        """Yield what was set or deleted since. path: the name of the module, with a dot."""
        items = {id(container): contents for container, contents in self.containers}
        before, now = _by_name(self.copy, items), _by_name(self.attributes, {})
        for name in before | now:
            was_in, old = before.get(name, ("", _NOTHING))
            is_in, new = now.get(name, ("", _NOTHING))
            is_same = old is new and was_in == is_in
            if is_same:
                old = items.get(id(new), new)
                if old is new or _is_equal(new, old):
                    continue
            after = _setting(path[:-1], name, new, is_same, _never if is_in else is_fixed)
            yield Change(path + name, new, after, _setting(path[:-1], name, old, is_same, _never))

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
        self._beside = [(tensor, _Saved.of(tensor)) for tensor in tensors_of(model)]

    def restore(self) -> None:
        """Put every attribute back to the object that it was."""
        for saved in self._saved.values():
            saved.restore()
        for _, saved in self._beside:
            saved.restore()

    def changes(self, modules: Iterable[tuple[str, nn.Module]], is_fixed: IsFixed) -> list[Change]:
        """Return what modules have got or lost since, as far as they are among `modules`; inner ones come first."""
        there = {module for _, module in modules}
        return [
            change
            for path, module in reversed(self.modules)
            if module in there and not (saved := self._saved[module]).is_same
            for change in saved.changes(path, is_fixed)
        ]

    def changes_beside(self) -> list[tuple[torch.Tensor, str]]:
        """Return the strided parameters and buffers that have got or lost an attribute since, with its name."""
        return [
            (tensor, change.name)
            for tensor, saved in self._beside
            if not saved.is_same and tensor.layout is torch.strided
            for change in saved.changes("", _never)
        ]


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


def held_in(value: Any) -> Iterator[torch.Tensor | nn.Module]:
    """Yield tensors and modules that lie in `value`: in nested containers, or as attributes of other objects there."""
    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor | nn.Module):
            yield leaf
        elif isinstance(inner := getattr(leaf, "__dict__", None), dict):
            yield from (item for item in _leaves(inner) if isinstance(item, torch.Tensor | nn.Module))


def _by_name(attributes: Mapping[str, Any], items: Mapping[int, Any]) -> dict[str, tuple[str, Any]]:
    """Return what hangs on a module, with where it is registered. items: what containers had, by id."""
    found = {name: ("", value) for name, value in attributes.items() if name not in _OWN}
    for registry in _REGISTRIES:
        held = attributes.get(registry, {})
        found |= {name: (registry, value) for name, value in items.get(id(held), held).items()}
    return found


def _setting(module: str, attribute: str, value: Any, is_same: bool, is_fixed: IsFixed) -> Setting | None:
    if value is _NOTHING:
        return Setting(module, attribute, None, is_gone=True)
    return Setting(module, attribute, _copied(value), is_same) if _is_simple(value, is_fixed) else None


def _never(tensor: torch.Tensor) -> bool:
    return False


def _is_simple(value: Any, is_fixed: IsFixed) -> bool:
    """Whether a value is such that a loader which had tensors with values would have set the same."""
    return all(
        is_fixed(leaf)
        if isinstance(leaf, torch.Tensor)
        else leaf is None or (isinstance(leaf, _SIMPLE) and leaf != "meta")  # what stand-ins say of their device
        for leaf in _leaves(value)
    )


def _leaves(value: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """Yield what lies in nested containers, keys too; a container where they are nested too deep."""
    if isinstance(value, tuple | frozenset | list | set | dict) and depth > 0:
        for item in chain(value, value.values()) if isinstance(value, dict) else value:
            yield from _leaves(item, depth - 1)
    else:
        yield value


def _copied(value: Any) -> Any:
    """Return plain containers anew, with the same things in them."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in _COPIED else value


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(items)
