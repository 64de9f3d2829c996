"""The key-value pairs of a GGUF file as typed, read-only values. What the keys mean is for others to know."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, overload

from tensorferry.errors import CorruptFile, shown

__all__ = ["GgufMetadata", "Texts", "Value", "ValueType", "numbers_of", "shortest"]


class ValueType(IntEnum):
    """The types of values, by their number in the file."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12

    @property
    def code(self) -> str:
        """The letter that `struct`, `array` and `memoryview` give a number of this type; "" for others."""
        return _CODES.get(self, "")

    @property
    def size(self) -> int:
        """Bytes of a number of this type; of a string or an array, the fewest that one takes."""
        return {ValueType.STRING: 8, ValueType.ARRAY: 12}.get(self) or struct.calcsize(f"<{self.code}")


_CODES = {
    ValueType.U8: "B", ValueType.I8: "b", ValueType.U16: "H", ValueType.I16: "h", ValueType.U32: "I",
    ValueType.I32: "i", ValueType.F32: "f", ValueType.BOOL: "?", ValueType.U64: "Q", ValueType.I64: "q",
    ValueType.F64: "d",
}  # fmt: skip
_INTEGERS = frozenset("BbHhIiQq")


class Value(NamedTuple):
    """A value with its type in the file. element: the type of its elements, if it is an array.

    value: bool, int, float or str; of an array a read-only memoryview of numbers, `Texts`, or a tuple of arrays. None
    where it was left in the file.
    """

    type: ValueType
    value: Any
    element: ValueType | None = None


class Texts(Sequence[str]):
    """An array of strings as it lies in a file, decoded when looked at: a vocabulary takes little more than its bytes.

    Bytes that are no UTF-8 are kept as lone surrogates (``errors="surrogateescape"``); `raw` has them as they are.
    """

    __slots__ = ("_bytes", "_starts")

    def __init__(self, data: bytes, starts: array[int]) -> None:
        """Take the strings in `data`, each after 8 bytes of length, at `starts`; the last of these is the end."""
        self._bytes = data
        self._starts = starts

    def raw(self, index: int) -> bytes:
        """Return the bytes of one string. Raises IndexError."""
        at = range(len(self))[index]
        return self._bytes[self._starts[at] + 8 : self._starts[at + 1]]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        return self.raw(index).decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        data = self._bytes
        for start, end in pairwise(self._starts):
            yield data[start + 8 : end].decode("utf-8", "surrogateescape")

    def __repr__(self) -> str:
        return f"<Texts: {len(self):,} strings, {len(self._bytes):,} bytes>"


class GgufMetadata(Mapping[str, Any]):
    """The metadata of a GGUF file by key, in the order of the file. Immutable.

    Numbers, booleans and strings are Python's own. An array is a read-only memoryview of numbers, `Texts`, or a tuple
    of arrays; None where arrays were not asked for. The methods that are named after a kind of value check it, return
    None where the key is absent, and raise CorruptFile, naming file and key, where the value is of another kind.
    """

    __slots__ = ("_values", "_what")

    def __init__(self, values: Mapping[str, Value], *, what: str) -> None:
        """Take values by key; `what` names the file in errors."""
        self._values = dict(values)
        self._what = what

    def __getitem__(self, key: str) -> Any:
        return self._values[key].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<GgufMetadata of {self._what}: {len(self)} keys>"

    def typed(self, key: str) -> Value:
        """Return a value with its type. Raises KeyError."""
        return self._values[key]

    def integer(self, key: str) -> int | None:
        """Return an integer of any width."""
        found = self._values.get(key)
        if found is not None and found.type.code not in _INTEGERS:
            self._refuse(key, found, "an integer")
        return None if found is None else int(found.value)

    def number(self, key: str) -> float | None:
        """Return a float or an integer as a float; of a 32-bit one the `shortest` decimal that it stands for."""
        found = self._values.get(key)
        if found is None:
            return None
        if found.type is ValueType.F32:
            return shortest(found.value)
        if found.type is not ValueType.F64 and found.type.code not in _INTEGERS:
            self._refuse(key, found, "a number")
        return float(found.value)

    def flag(self, key: str) -> bool | None:
        """Return a boolean."""
        found = self._values.get(key)
        if found is not None and found.type is not ValueType.BOOL:
            self._refuse(key, found, "a boolean")
        return None if found is None else bool(found.value)

    def text(self, key: str) -> str | None:
        """Return a string."""
        found = self._values.get(key)
        if found is not None and found.type is not ValueType.STRING:
            self._refuse(key, found, "a string")
        return None if found is None or found.value is None else str(found.value)

    def texts(self, key: str) -> Sequence[str] | None:
        """Return an array of strings."""
        found = self._values.get(key)
        if found is not None and found.element is not ValueType.STRING:
            self._refuse(key, found, "an array of strings")
        return None if found is None else found.value

    def integers(self, key: str) -> Sequence[int] | None:
        """Return an array of integers of any width."""
        found = self._values.get(key)
        if found is not None and (found.element is None or found.element.code not in _INTEGERS):
            self._refuse(key, found, "an array of integers")
        return None if found is None else found.value

    def numbers(self, key: str) -> Sequence[float] | None:
        """Return an array of floats or integers, as they are in the file."""
        found = self._values.get(key)
        if found is not None and (found.element is None or found.element.code not in _INTEGERS | {"f", "d"}):
            self._refuse(key, found, "an array of numbers")
        return None if found is None else found.value

    def flags(self, key: str) -> Sequence[bool] | None:
        """Return an array of booleans."""
        found = self._values.get(key)
        if found is not None and found.element is not ValueType.BOOL:
            self._refuse(key, found, "an array of booleans")
        return None if found is None else found.value

    def as_text(self) -> dict[str, str]:
        """Return what is no array, and was not left in the file, as text that can be encoded.

        Numbers are written as Python does, booleans as true and false; bytes that are no UTF-8 become U+FFFD.
        """
        texts = {key: _as_text(found) for key, found in self._values.items()}
        return {key: text for key, text in texts.items() if text is not None}

    def _refuse(self, key: str, found: Value, expected: str) -> NoReturn:
        kind = found.type.name if found.element is None else f"an array of {found.element.name}"
        raise CorruptFile(f"{self._what}: {shown(key)} must be {expected}, it is {kind}")


def numbers_of(data: bytes, element: ValueType, *, little: bool) -> memoryview:
    """Return numbers as a read-only view of `data`, or of a copy in this machine's byte order.

    >>> numbers_of(b"\\1\\0\\2\\0", ValueType.U16, little=True).tolist()
    [1, 2]
    """
    if little == (sys.byteorder == "little") or element.size == 1:
        return memoryview(data).cast(element.code)  # type: ignore[call-overload, no-any-return]
    turned = array(element.code, data)
    turned.byteswap()
    return memoryview(turned).toreadonly()


def shortest(value: float) -> float:
    """Return the number with the fewest digits of which a 32-bit float's `value` is the nearest one.

    >>> shortest(9.999999974752427e-07), shortest(0.5)
    (1e-06, 0.5)
    """
    for digits in range(1, 9):
        candidate = float(f"{value:.{digits}g}")
        try:
            if struct.unpack("<f", struct.pack("<f", candidate))[0] == value:
                return candidate
        except OverflowError:
            continue
    return value


def _as_text(found: Value) -> str | None:
    if found.element is not None or found.value is None:
        return None
    if found.type is ValueType.BOOL:
        return "true" if found.value else "false"
    if found.type is ValueType.STRING:
        return str(found.value).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return str(shortest(found.value) if found.type is ValueType.F32 else found.value)
