"""The attributes of all modules of a model at one moment, and putting them back. Values of tensors are not kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorferry.modules.containers import Remembered, as_was, contained, copied, is_a, is_empty, leaves, refill, within
from tensorferry.modules.describe import Place, places, walked_once

__all__ = ["Change", "IsFixed", "Setting", "Snapshot", "attribute_tensors"]

_SIMPLE = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.Size)
_OWN = frozenset(name for name, value in vars(nn.Module()).items() if type(value) in (dict, set) and "hook" not in name)
"""Where every module keeps its parts, and the like."""
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_NOTHING = object()

IsFixed = Callable[[torch.Tensor], bool]
"""Says whether a tensor has its values, and would have them in any other load."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that was set as `attribute` of the module that is called `module` from the root, or of a tensor of it.

    Tensors in it have the same values in every load; they are set as they are, and not copied. A value of None may take
    the place of a module, a parameter or a buffer. tensor: the name in the module of the parameter or buffer that has
    the attribute, empty where the module has. is_same: whether it is a container that was there before, whose contents
    are others. is_gone: whether the attribute was deleted.
    """

    module: str
    attribute: str
    value: Any
    is_same: bool = False
    is_gone: bool = False
    tensor: str = ""

    @property
    def name(self) -> str:
        """The name of the attribute from the root."""
        return ".".join(filter(None, (self.module, self.tensor, self.attribute)))

    def put_on(self, model: nn.Module) -> None:
        """Set the attribute of that module of `model`, or fill the container that is there; raises what that raises."""
        module = model.get_submodule(self.module)
        holder = getattr(module, self.tensor) if self.tensor else module
        if self.is_gone:
            with suppress(AttributeError):
                delattr(holder, self.attribute)
        elif not self.is_same:
            setattr(holder, self.attribute, copied(self.value))
        else:
            held = vars(holder).get(self.attribute)
            if (value := within(held, self.value)) is not held:
                setattr(holder, self.attribute, value)


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
    """Attributes of one object, and what was in them and in the containers among them. empty: those with nothing."""

    attributes: Remembered
    containers: list[Remembered]
    empty: list[Any]

    @classmethod
    def of(cls, holder: object) -> _Saved:
        attributes = vars(holder)
        found = list(contained(attributes.values()))
        held = [Remembered.of(container) for container in found if not is_empty(container)]
        return cls(Remembered.of(attributes), held, list(filter(is_empty, found)))

    @property
    def is_same(self) -> bool:
        """Whether nothing was set since; most modules are not written to, so this is asked before each attribute is."""
        return not any(self.empty) and self.attributes.is_same and all(held.is_same for held in self.containers)

    def changes(self, module: str, tensor: str, is_fixed: IsFixed) -> Iterator[Change]:
        """Yield what was set or deleted since. module, tensor: whose attributes they are, as in `Setting`."""
        items: dict[int, Any] = {id(container): {} if isinstance(container, dict) else () for container in self.empty}
        items |= {id(held.container): held.items for held in self.containers}
        changed = {id(container) for container in self.empty if container}
        changed |= {id(held.container) for held in self.containers if not held.is_same}
        before, now = _by_name(self.attributes.items, items), _by_name(self.attributes.container, {})
        for name in before | now:
            was_in, old = before.get(name, ("", _NOTHING))
            is_in, new = now.get(name, ("", _NOTHING))
            is_same = old is new and was_in == is_in
            if is_same and changed.isdisjoint(map(id, contained([new]))):
                continue
            old = as_was(old, items)
            after = _setting(module, tensor, name, new, is_same, _never if is_in else is_fixed)
            back = _setting(module, tensor, name, old, is_same, _never)
            where = ".".join(filter(None, (module, tensor, name)))
            yield Change(where, new, after, back)

    def restore(self) -> None:
        for container in filter(None, self.empty):
            refill(container, {})
        for held in self.containers:
            held.restore()
        self.attributes.restore()


class Snapshot:
    """What hangs on the modules and on the parameters of a model: attributes, and containers among them.

    modules: all of them, with their first names and a dot.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = walked_once(model)
        self._saved = {module: _Saved.of(module) for _, module in self.modules}
        self._beside = [(place, _Saved.of(place.tensor)) for place in _once(places(model))]

    def restore(self) -> None:
        """Put every attribute back to the object that it was."""
        for saved in self._saved.values():
            saved.restore()
        for _, saved in self._beside:
            saved.restore()

    def changes(self, modules: Iterable[tuple[str, nn.Module]], is_fixed: IsFixed) -> list[Change]:
        """Return what modules and their tensors have got or lost since, as far as they are among `modules`.

        Inner modules come first, and tensors last. is_fixed: of tensors that were set as attributes.
        """
        there = {module for _, module in modules}
        found = [
            change
            for path, module in reversed(self.modules)
            if module in there and not (saved := self._saved[module]).is_same
            for change in saved.changes(path[:-1], "", is_fixed)
        ]
        return found + [
            change
            for place, saved in self._beside
            if not saved.is_same and place.module in there and _still_hangs(place)
            for change in saved.changes(place.name.removesuffix(place.leaf)[:-1], place.leaf, _never)
        ]


def _once(found: Iterable[Place]) -> Iterator[Place]:
    """Yield each tensor at the first place where it hangs."""
    known: set[int] = set()
    for place in found:
        if id(place.tensor) not in known:
            known.add(id(place.tensor))
            yield place


def _still_hangs(place: Place) -> bool:
    tensors = place.module._parameters if place.is_parameter else place.module._buffers
    return tensors.get(place.leaf) is place.tensor


def attribute_tensors(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that hangs on one of `modules` in any way, in plain containers too, with a name.

    modules: with the names that those of their tensors begin with.
    """
    for prefix, module in modules:
        for attribute, value in vars(module).items():
            kind = type(value)
            if issubclass(kind, torch.Tensor):
                if value.layout is torch.strided:
                    yield prefix + attribute, value
            elif (kind is dict or kind is list or kind is set or kind is OrderedDict) and value:
                registered = attribute in ("_parameters", "_buffers")
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if is_a(item, torch.Tensor) and item.layout is torch.strided:
                        yield prefix + (str(key) if registered else f"{attribute}[{key}]"), item


def _by_name(attributes: Mapping[str, Any], items: Mapping[int, Any]) -> dict[str, tuple[str, Any]]:
    """Return what hangs on a module, with where it is registered. items: what containers had, by id."""
    found = {name: ("", value) for name, value in attributes.items() if name not in _OWN}
    for registry in _REGISTRIES:
        held = attributes.get(registry, {})
        found |= {name: (registry, value) for name, value in items.get(id(held), held).items()}
    return found


def _setting(module: str, tensor: str, attribute: str, value: Any, is_same: bool, is_fixed: IsFixed) -> Setting | None:
    if value is _NOTHING:
        return Setting(module, attribute, None, is_gone=True, tensor=tensor)
    if not _is_simple(value, is_fixed):
        return None
    return Setting(module, attribute, copied(value), is_same, tensor=tensor)


def _never(tensor: torch.Tensor) -> bool:
    return False


def _is_simple(value: Any, is_fixed: IsFixed) -> bool:
    """Whether a value is such that a loader which had tensors with values would have set the same."""
    return all(
        is_fixed(leaf)
        if is_a(leaf, torch.Tensor)
        else leaf is None or (is_a(leaf, _SIMPLE) and leaf != "meta")  # what stand-ins say of their device
        for leaf in leaves(value)
    )
