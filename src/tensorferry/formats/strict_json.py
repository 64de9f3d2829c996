"""JSON as RFC 8259 has it and nothing beside: what the standard library lets pass is refused by name here.

Only syntax lives here. What a header or an index means is for their own modules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import isfinite
from typing import Any

from tensorferry.errors import CorruptFile, shown

__all__ = ["MAX_DEPTH", "parse_json_object"]

MAX_DEPTH = 127
"""How many objects and arrays may be open at once; the reference reader of safetensors has the same limit."""

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


class _Refused(Exception):
    """Well-formed for the standard library, and yet not JSON or not unambiguous."""


def parse_json_object(data: bytes, *, what: str, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return the one object that `data` is. `what` opens every message: the file, as its storage calls it.

    Refused with CorruptFile: anything but strict UTF-8 without a byte order mark; NaN and Infinity, also by overflow;
    duplicate keys, compared after unescaping, at any level; lone surrogates; more than `max_depth` nested containers;
    text before or after the object.

    >>> parse_json_object(b'{"a": [1, true]}', what="index")
    {'a': [1, True]}
    """
    text = decode_utf8(data, what=what)
    if _depth_exceeds(text, max_depth):
        raise CorruptFile(f"{what}: JSON nested deeper than {max_depth} levels")
    try:
        value = _DECODER.decode(text)
    except (_Refused, ValueError, RecursionError) as error:
        raise CorruptFile(f"{what}: {json_fault(error)}") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{what}: a JSON object is expected, found {json_kind(value)}")
    if "\\u" in text:
        refuse_lone_surrogates(value, what=what)
    return value


def decode_utf8(data: bytes, *, what: str) -> str:
    """Return `data` as text, or raise CorruptFile if it is not UTF-8 or opens with a byte order mark."""
    if data[:3] == b"\xef\xbb\xbf" or data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise CorruptFile(f"{what}: starts with a byte order mark; JSON here is UTF-8 without one")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{what}: not UTF-8 at byte {error.start}: {error.reason}") from None


def json_fault(error: Exception) -> str:
    """Return in words what made the standard parser, or a hook of ours, give up."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON at character {error.pos}: {error.msg}"
    if isinstance(error, RecursionError):
        return "JSON nested too deep"
    if isinstance(error, _Refused):
        return str(error)
    return "not valid JSON: a number with thousands of digits"


def json_kind(value: object) -> str:
    """Return what JSON calls `value`.

    >>> json_kind(True), json_kind([]), json_kind(None)
    ('a boolean', 'an array', 'null')
    """
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return kinds.get(type(value), "an object")


def refuse_lone_surrogates(value: object, *, what: str) -> None:
    """Raise CorruptFile if a key or string in `value` holds half of a surrogate pair, which is no character."""
    for text in _strings(value):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise CorruptFile(f"{what}: lone surrogate in the string {shown(text)!r}") from None


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _depth_exceeds(text: str, limit: int) -> bool:
    if text.count("{") + text.count("[") <= limit:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        token = text[match.start()]
        if token in "[{":
            depth += 1
            if depth > limit:
                return True
        elif token in "]}":
            depth -= 1
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"duplicate key {shown(key)!r}")
            seen.add(key)
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise _Refused(f"the number {shown(text)} is too large")
    return value


def _refuse_constant(text: str) -> float:
    raise _Refused(f"{text} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant)
