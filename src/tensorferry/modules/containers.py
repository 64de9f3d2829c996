"""Containers that hang on modules and parameters: what lies in them, copies of them, and putting them back.

What classes derived from dict, list and the like make of their methods is passed by, so no code of theirs runs.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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


def _found_base(kind: type) -> type | None:
    return next((base for base in (OrderedDict, dict, list, set, deque) if issubclass(kind, base)), None)


_base: Callable[[Any], type | None] = lru_cache(maxsize=1024)(_found_base)
"""Returns the class whose methods hold what is in such a container; None for what is none, or cannot change."""


def items_in(value: Any) -> Any:
    """Return what is in a container now: as a dict, list or set, or `value` if it cannot change; None if it is none."""
    if _base(type(value)) is not None:
        return _items(value)
    return value if isinstance(value, _FIXED) else None


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
    if kind not in _STANDARD:
        return copied(value)
    now = _items(held)
    if isinstance(value, dict):
        refill(held, {key: within(now.get(key), item) for key, item in value.items()})
    elif isinstance(value, set):
        refill(held, value)
    else:
        refill(held, [within(old, item) for old, item in zip_longest(now, value)][: len(value)])
    return held


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
    if type(value) not in _STANDARD:
        return value
    items = items_of(value)
    new = copy.copy(value)
    if isinstance(new, dict):
        refill(new, {key: _anew(item, items_of, depth - 1) for key, item in items.items()})
    else:
        refill(new, [_anew(item, items_of, depth - 1) for item in items])
    return new


def _found_to_hold(kind: type) -> bool:
    return kind is tuple or _base(kind) is not None


_may_hold: Callable[[Any], bool] = lru_cache(maxsize=1024)(_found_to_hold)
"""Whether containers lie in what is of this class, or it is one."""


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
        if value:
            inner = value if kind in _STANDARD or kind is tuple else _items(value)
            left.extend(i for i in (inner.values() if isinstance(inner, dict) else inner) if _may_hold(type(i)))


def leaves(value: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """Yield what lies in nested containers, keys too; a container where they are nested too deep.

    One of a class that is not Python's own comes as well, before what lies in it.
    """
    kind = type(value)
    if depth == 0 or not (_base(kind) is not None or isinstance(value, _FIXED)):
        yield value
        return
    if kind not in _STANDARD and not isinstance(value, _FIXED):
        yield value
    items = value if isinstance(value, _FIXED) else _items(value)
    for item in chain(items, items.values()) if isinstance(items, dict) else items:
        yield from leaves(item, depth - 1)


def held_in(value: Any) -> Iterator[torch.Tensor | nn.Module]:
    """Yield tensors and modules that lie in `value`.

    In nested containers, as attributes of other objects there, or in what functions there keep for their calls.
    """
    for leaf in _with_inner(value, set()):
        if isinstance(leaf, torch.Tensor | nn.Module):
            yield leaf
        elif isinstance(inner := getattr(leaf, "__dict__", None), dict) and not isinstance(leaf, type):
            yield from (item for item in leaves(inner) if isinstance(item, torch.Tensor | nn.Module))


def _with_inner(value: Any, known: set[int]) -> Iterator[Any]:
    """Yield what lies in `value`, and in functions there, and in functions that those keep."""
    for leaf in leaves(value):
        yield leaf
        if isinstance(leaf, FUNCTIONS) and id(leaf) not in known:
            known.add(id(leaf))
            yield from _with_inner(inside_function(leaf), known)


def inside_function(function: Any) -> tuple[Any, ...]:
    """Return what one of `FUNCTIONS` keeps for its calls: arguments, and variables of the function around it."""
    if isinstance(function, MethodType):
        return function.__self__, function.__func__
    if isinstance(function, partial):
        return function.func, function.args, function.keywords
    return function.__defaults__, function.__kwdefaults__, *map(_cell, function.__closure__ or ())


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None
