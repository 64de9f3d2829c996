"""Containers that hang on modules and parameters: what lies in them, copies of them, and putting them back.

What classes derived from dict, list and the like make of their methods is passed by, so no code of theirs runs; nor is
any object asked what it is, which a weak reference answers for another.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import chain, zip_longest
from operator import is_
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = [
    "FUNCTIONS",
    "Remembered",
    "as_was",
    "contained",
    "copied",
    "held_in",
    "inside_function",
    "is_a",
    "is_empty",
    "items_in",
    "leaves",
    "refill",
    "within",
]

FUNCTIONS = (FunctionType, MethodType, partial)
"""What keeps things for the calls of it."""

_STANDARD = frozenset({dict, list, set, OrderedDict, defaultdict, Counter, deque})
"""What a copy can be made of that is the same in all."""
_FIXED = (tuple, frozenset)
_DEEPEST = 20


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether the class of `value` itself, and not what it says of it, is one of `kinds` or derived from them."""
    return issubclass(type(value), kinds)


class Remembered(NamedTuple):
    """A container, and what was in it at some moment: as a dict, list or set."""

    container: Any
    items: Any

    @classmethod
    def of(cls, container: Any) -> Remembered:
        """Remember what is in `container` now; what lies deeper is not looked at."""
        return cls(container, _items(container))

    @property
    def is_same(self) -> bool:
        """Whether the same objects are in it, in the same order where it has one."""
        container, items = self
        now = container if type(container) in _STANDARD else _items(container)
        if len(now) != len(items):
            return False
        if isinstance(items, set):
            return bool(now == items)
        if isinstance(items, dict) and not all(map(is_, now.values(), items.values())):
            return False
        return all(map(is_, now, items))

    def restore(self) -> None:
        """Put back what was in it."""
        if not self.is_same:
            refill(self.container, self.items)


@lru_cache(maxsize=1024)
def _known_base(kind: Hashable) -> type | None:
    assert isinstance(kind, type)
    return next((base for base in (OrderedDict, dict, list, set, deque) if issubclass(kind, base)), None)


def _base(kind: Any) -> type | None:
    """Return the class whose methods hold what is in such a container; None for what is none, or cannot change."""
    try:
        return _known_base(kind)
    except TypeError:  # of a class that cannot be hashed nothing is known
        return None


def items_in(value: Any) -> Any:
    """Return what is in a container now: as a dict, list or set, or `value` if it cannot change; None if it is none."""
    if _base(type(value)) is not None:
        return _items(value)
    return value if is_a(value, _FIXED) else None


def _items(container: Any) -> Any:
    if type(container) in (dict, list, set):
        return container.copy()
    base: Any = _base(type(container))
    if base in (dict, OrderedDict):
        return dict(base.items(container))
    return (set if base is set else list)(base.__iter__(container))


def refill(container: Any, items: Any) -> None:
    """Have in `container` what is in `items`, and nothing else."""
    base: Any = _base(type(container))
    base.clear(container)
    if base in (dict, OrderedDict):
        for key, value in items.items():
            base.__setitem__(container, key, value)
    else:
        (base.update if base is set else base.extend)(container, items)


def within(held: Any, value: Any) -> Any:
    """Return `held` with what is in `value`, also in containers that lie in both at one place; or `value` anew.

    The latter where `held` is of another type, or nothing that can be changed so.
    """
    kind = type(value)
    if type(held) is not kind:
        return copied(value)
    if kind is tuple and len(held) == len(value):
        items = tuple(map(within, held, value))
        return held if all(map(is_, items, held)) else items
    if _base(kind) is None or kind not in _STANDARD or not all(map(is_, _kept_beside(held), _kept_beside(value))):
        return copied(value)
    now = _items(held)
    if isinstance(value, dict):
        refill(held, {key: within(now.get(key), item) for key, item in value.items()})
    elif isinstance(value, set):
        refill(held, value)
    else:
        refill(held, [within(old, item) for old, item in zip_longest(now, value)][: len(value)])
    return held


def _kept_beside(container: Any) -> tuple[Any, Any]:
    """Return what a container has besides what is in it: how much it takes, and what it makes for new keys."""
    return getattr(container, "maxlen", None), getattr(container, "default_factory", None)


def copied(value: Any) -> Any:
    """Return containers of Python's own classes anew, also those in them, with the same things in them."""
    return _anew(value, _items, _DEEPEST)


def as_was(value: Any, items: Mapping[int, Any]) -> Any:
    """Return `value` as it was when containers in it had `items`, by their ids; containers are new, as in `copied`."""
    return _anew(value, lambda container: items.get(id(container), container), _DEEPEST)


def _anew(value: Any, items_of: Callable[[Any], Any], depth: int) -> Any:
    if depth == 0:
        return value
    if type(value) in _FIXED:
        return type(value)(_anew(item, items_of, depth - 1) for item in value)
    if _base(type(value)) is None or type(value) not in _STANDARD:
        return value
    items = items_of(value)
    new = copy.copy(value)
    if isinstance(new, dict):
        refill(new, {key: _anew(item, items_of, depth - 1) for key, item in items.items()})
    else:
        refill(new, [_anew(item, items_of, depth - 1) for item in items])
    return new


def _may_hold(kind: Any) -> bool:
    """Whether containers lie in what is of this class, or it is one."""
    return kind is tuple or _base(kind) is not None


def contained(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the containers among `values`, and those that lie in them, each once."""
    left = [value for value in values if _may_hold(type(value))]
    known: set[int] = set()
    while left:
        value = left.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        kind = type(value)
        if kind is not tuple:
            yield value
        inner = value if kind is tuple or kind in _STANDARD else _items(value)
        if inner:
            left.extend(i for i in (inner.values() if isinstance(inner, dict) else inner) if _may_hold(type(i)))


def is_empty(container: Any) -> bool:
    """Whether nothing is in a container; of one of a class of its own that is not said."""
    return type(container) in _STANDARD and not container


def leaves(value: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """Yield what lies in nested containers, keys too; a container where they are nested too deep.

    One of a class that is not Python's own comes as well, before what lies in it.
    """
    kind = type(value)
    is_fixed = issubclass(kind, _FIXED)
    if depth == 0 or not (_base(kind) is not None or is_fixed):
        yield value
        return
    if not is_fixed and kind not in _STANDARD:
        yield value
    items = value if is_fixed else _items(value)
    for item in chain(items, items.values()) if isinstance(items, dict) else items:
        yield from leaves(item, depth - 1)


def held_in(value: Any) -> Iterator[torch.Tensor | nn.Module]:
    """Yield tensors and modules that lie in `value`.

    In nested containers, as attributes of other objects there, or in what functions there keep for their calls.
    """
    for leaf in _with_inner(value):
        if is_a(leaf, (torch.Tensor, nn.Module)):
            yield leaf
        elif not is_a(leaf, type):
            yield from (item for item in leaves(_attributes_of(leaf)) if is_a(item, (torch.Tensor, nn.Module)))


def _attributes_of(thing: Any) -> Any:
    """Return the attributes that an object keeps, without a word from its class."""
    try:
        return object.__getattribute__(thing, "__dict__")
    except Exception:  # noqa: BLE001 - a property of that name may raise anything
        return None


def _with_inner(value: Any) -> Iterator[Any]:
    """Yield what lies in `value`, and in functions there, and in functions that those keep."""
    left, known = [value], set[int]()
    while left:
        for leaf in leaves(left.pop()):
            yield leaf
            if is_a(leaf, FUNCTIONS) and id(leaf) not in known:
                known.add(id(leaf))
                left.append(inside_function(leaf))


def inside_function(function: Any) -> tuple[Any, ...]:
    """Return what one of `FUNCTIONS` keeps for its calls: arguments, and variables of the function around it."""
    if is_a(function, MethodType):
        return function.__self__, function.__func__
    if is_a(function, partial):
        return function.func, function.args, function.keywords
    return function.__defaults__, function.__kwdefaults__, *map(_cell, function.__closure__ or ())


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None
