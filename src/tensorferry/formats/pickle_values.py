"""What a pickle may turn into: plain values and descriptions. Nothing here imports or calls what a file names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeGuard, TypeVar

from tensorferry.errors import FormatError, shown

__all__ = [
    "MAX_DEPTH",
    "BadValue",
    "Composite",
    "DictValue",
    "LeftOut",
    "Maker",
    "Refused",
    "Scalar",
    "SetValue",
    "is_scalar",
    "survey",
]

MAX_DEPTH = 100
"""The deepest nesting of containers in a pickle that is believed."""

Scalar = str | bytes | int | float | complex | bool | None
_SCALARS = frozenset({str, bytes, int, float, complex, bool, type(None)})


class BadValue(Exception):
    """A pickle builds something impossible. Readers turn it into an error that names the file."""


class Composite(ABC):
    """A described value that may hold other values."""

    __slots__ = ()

    @abstractmethod
    def parts(self) -> Iterator[tuple[str, object]]:
        """Yield what it holds, each with a label for messages."""


def is_scalar(value: object) -> TypeGuard[Scalar]:
    """Whether `value` is exactly of one of the plain types that hold no other value."""
    return type(value) in _SCALARS


@dataclass(slots=True, eq=False)
class DictValue(Composite):
    """A dict of any kind. `items` has the scalar keys; pairs with other keys are in `rest`, never hashed.

    state: what an OrderedDict carries beside its items (the `_metadata` of a module's state).
    """

    items: dict[Scalar, object] = field(default_factory=dict)
    rest: list[tuple[object, object]] = field(default_factory=list)
    state: object = None

    def set(self, key: object, value: object) -> None:
        """Add a pair. Raises BadValue if the key is there already: no writer does that."""
        if not is_scalar(key):
            self.rest.append((key, value))
        elif key in self.items:
            raise BadValue(f"key {shown(str(key))!r} is set twice")
        else:
            self.items[key] = value

    def parts(self) -> Iterator[tuple[str, object]]:
        for key, value in self.items.items():
            yield str(key), value
        for pair in self.rest:
            yield "?", pair
        yield "state", self.state

    def __bool__(self) -> bool:
        return bool(self.items or self.rest)


@dataclass(slots=True, eq=False)
class SetValue(Composite):
    """A set or frozenset; its elements are never hashed."""

    elements: list[object] = field(default_factory=list)

    def parts(self) -> Iterator[tuple[str, object]]:
        return (("?", element) for element in self.elements)


@dataclass(slots=True, eq=False)
class LeftOut(Composite):
    """A value of a harmless type that is no tensor and is not rebuilt; `held` is what it was made of."""

    kind: str
    held: list[object] = field(default_factory=list)

    def parts(self) -> Iterator[tuple[str, object]]:
        return (("?", part) for part in self.held)


@dataclass(frozen=True, slots=True)
class Maker:
    """A global that a pickle may call: `make` turns the arguments into a description, or raises BadValue."""

    name: str
    make: Callable[[tuple[object, ...]], object]


@dataclass(frozen=True, slots=True)
class Refused:
    """A global that is known and not read: which error to raise, and what to say in it."""

    error: type[FormatError]
    words: str


T = TypeVar("T")


def survey(top: object, wanted: type[T]) -> Iterator[tuple[str, T]]:
    """Yield each `wanted` value inside `top` once, with its dotted path.

    Raises BadValue where a container holds itself or nests deeper than MAX_DEPTH. Takes time in the number of
    distinct values, however often they are shared, and no recursion.
    """
    heights: dict[int, int] = {id(top): _OPEN}
    path = [_Node(top, "")]
    while path:
        node = path[-1]
        label, child = next(node.parts, ("", _DONE))
        if child is _DONE:
            heights[id(node.value)] = path.pop().height
            if path:
                path[-1].carries(node.height)
        elif not is_scalar(child):
            height = heights.get(id(child))
            _check_nesting(path, height)
            if height is not None:
                node.carries(height)
                continue
            heights[id(child)] = _OPEN
            path.append(_Node(child, label))
            if isinstance(child, wanted):
                yield _dotted(path), child


_OPEN = 0
_DONE = object()


class _Node:
    """A container on the way down. height: levels of nesting in it, known when all its parts were seen."""

    __slots__ = ("height", "label", "parts", "value")

    def __init__(self, value: object, label: str) -> None:
        self.value = value
        self.label = label
        self.parts = _parts(value)
        self.height = 1

    def carries(self, height: int) -> None:
        self.height = max(self.height, height + 1)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, list | tuple):
        return ((str(i), part) for i, part in enumerate(value))
    return value.parts() if isinstance(value, Composite) else iter(())


def _check_nesting(path: list[_Node], height: int | None) -> None:
    if height == _OPEN:
        raise BadValue(f"a container at {shown(_dotted(path))!r} holds itself")
    if len(path) + (height or 1) > MAX_DEPTH:
        raise BadValue(f"containers at {shown(_dotted(path))!r} nest deeper than {MAX_DEPTH} levels")


def _dotted(path: list[_Node]) -> str:
    return ".".join(node.label for node in path[1:])
