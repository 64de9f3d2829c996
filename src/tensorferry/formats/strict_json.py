"""JSON as RFC 8259 has it and nothing beside: what the standard library lets pass is refused by name here.

Small texts come out as one dict; a header of up to 100 MB is read member by member, so that refusing it takes
little memory. What a header or an index means is for their own modules.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from typing import Any

from tensorferry.errors import CorruptFile, shown

__all__ = [
    "MAX_DEPTH",
    "JsonStream",
    "Pairs",
    "json_kind",
    "json_text",
    "parse_json_object",
    "parse_json_strings",
    "refuse_ambiguous",
]

MAX_DEPTH = 127
"""How many objects and arrays may be open at once; the reference reader of safetensors has the same limit."""

Pairs = tuple[tuple[str, Any], ...]
"""An object as `JsonStream` yields it: its members in order, so that a duplicate key can still be seen."""


class _Refused(Exception):
    """Well-formed for the standard library, and yet not JSON or not unambiguous."""


_FAULTS = (_Refused, ValueError, IndexError, RecursionError)


def parse_json_object(data: bytes, *, what: str, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return the one object that `data` is. `what` opens every message: the file, as its storage calls it.

    Refused with CorruptFile: anything but strict UTF-8 without a byte order mark; NaN and Infinity, also by overflow;
    duplicate keys, compared after unescaping, at any level; lone surrogates; more than `max_depth` nested containers;
    text before or after the object.

    >>> parse_json_object(b'{"a": [1, true]}', what="index")
    {'a': [1, True]}
    """
    text = _decode_utf8(data, what)
    try:
        value = _DICTS.decode(text)
    except _FAULTS as error:
        at = f", at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise CorruptFile(f"{what}: {_in_words(error)}{at}") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{what}: a JSON object is expected, found {json_kind(value)}")
    if "\\u" in text or text.count("{") + text.count("[") > max_depth:
        refuse_ambiguous(value, what=what, max_depth=max_depth)
    return value


def parse_json_strings(data: bytes, *, what: str, most: int) -> list[str]:
    """Return the one array of strings, at most `most` of them, that `data` is; nothing else is built on the way.

    Refused with CorruptFile as by `parse_json_object`, and whatever is no string.

    >>> parse_json_strings(b'["a", "b"]', what="names", most=2)
    ['a', 'b']
    """
    text = _decode_utf8(data, what)
    found: list[str] = []
    at, mark = _after_space(text, 0), ","
    if text[at : at + 1] != "[":
        raise CorruptFile(f"{what}: a JSON array is expected, found {shown(text[at : at + 1])!r}")
    if text[(after := _after_space(text, at + 1)) : after + 1] == "]":
        at, mark = after + 1, "]"
    else:
        at += 1
    while mark == ",":
        value, at = _string_in(text, _after_space(text, at), what)
        found.append(value)
        if len(found) > most:
            raise CorruptFile(f"{what}: over {most} strings")
        mark, at = text[at : at + 1], at + 1
    if mark != "]" or _after_space(text, at) != len(text):
        raise CorruptFile(f"{what}: not one JSON array of strings, at character {at}")
    return found


def _string_in(text: str, at: int, what: str) -> tuple[str, int]:
    """Return the string that begins at `at`, and where the text goes on after it and white space."""
    if text[at : at + 1] != '"':
        raise CorruptFile(f"{what}: a string is expected, found {shown(text[at : at + 1])!r}, at character {at}")
    try:
        value, end = _DICTS.raw_decode(text, at)
    except _FAULTS as error:
        raise CorruptFile(f"{what}: {_in_words(error)}, at character {at}") from None
    _refuse_lone_surrogates(value, what)
    return value, _after_space(text, end)


class JsonStream:
    """One JSON object whose UTF-8 text comes in `pieces` that are cut anywhere.

    Refuses what `parse_json_object` refuses, with two differences that are for speed: objects inside of values come
    as `Pairs`, whose depth and duplicate keys `refuse_ambiguous` checks, and duplicate keys of the members themselves
    are for the caller to see. A -0 comes as the float that it is, so that it is not taken for an integer.
    """

    __slots__ = ("_before", "_decode", "_escapes", "_pieces", "_position", "_text", "_utf8", "_what")

    def __init__(self, pieces: Iterable[bytes], *, what: str) -> None:
        self._pieces = iter(pieces)
        self._utf8 = getincrementaldecoder("utf-8")()
        self._what = what
        self._text = ""
        self._position = self._before = 0
        self._escapes = False
        self._decode: Callable[[str, int], tuple[Any, int]] = _PAIRS.raw_decode

    def members(self, *, limit: int, descend: str | None = None) -> Iterator[tuple[str, Any]]:
        """Yield key and value of each member of the object that comes next, each read when it is asked for.

        limit: characters that one member may take. descend: the key of a member whose value is not read: None is
        yielded for it, and the caller reads it with `members` before going on.
        """
        found = self.peek()
        if found != "{":
            raise self._fault(f"a JSON object is expected, found {found!r}" if found else "it ends early")
        self._position += 1
        if self.peek() == "}":
            self._position += 1
            return
        while True:
            member = self._member(limit, descend)
            if self._escapes:
                refuse_ambiguous((member,), what=self._what)
            yield member
            at = self._position
            mark = self._text[at : at + 1]
            if mark in _SPACE_OR_END:
                mark = self.peek()
            self._position += 1
            if mark == "}":
                return
            if mark != ",":
                raise self._fault(f"',' or '}}' is expected, found {mark!r}" if mark else "it ends early")

    def end(self) -> None:
        """Raise CorruptFile if anything but white space follows."""
        if found := self.peek():
            raise self._fault(f"nothing but spaces may follow the JSON object, found {found!r}")

    def _member(self, limit: int, descend: str | None) -> tuple[str, Any]:
        if self._text[self._position : self._position + 1] in _SPACE_OR_END:
            self.peek()
        while True:
            start = self._before + self._position
            try:
                member = self._member_in_text(descend)
            except _FAULTS as error:
                # Perhaps it was only cut; a fault that is one is still there when more of the text has come.
                if len(self._text) - self._position > limit:
                    raise self._fault(
                        f"{_in_words(error)} (or one member takes over {limit} characters)", error
                    ) from None
                if not self._more():
                    raise self._fault(_in_words(error), error) from None
            else:
                if self._before + self._position - start > limit:
                    raise self._fault(f"the member {shown(member[0])!r} takes over {limit} characters")
                return member

    def _member_in_text(self, descend: str | None) -> tuple[str, Any]:
        text, at = self._text, self._position
        if text[at] != '"':
            raise json.JSONDecodeError("a key in double quotes is expected", text, at)
        key, at = self._decode(text, at)
        if text[at] in _SPACE_OR_END:
            at = _after_space(text, at)
        if text[at] != ":":
            raise json.JSONDecodeError("':' is expected after a key", text, at)
        at += 1
        if text[at] in _SPACE_OR_END:
            at = _after_space(text, at)
        if key == descend:
            value = None
        else:
            value, at = self._decode(text, at)
            # What ends a value must be there to be seen: a number that ends with the text may go on in the next piece.
            if text[at] not in _AFTER_VALUE:
                raise json.JSONDecodeError("',' or '}' is expected after a value", text, at)
        self._position = at
        return key, value

    def peek(self) -> str:
        """Skip white space; return the character there, or "" at the end."""
        while True:
            self._position = _after_space(self._text, self._position)
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Drop the text that is done with and append the next piece; False if there is none."""
        piece = next(self._pieces, None)
        try:
            new = self._utf8.decode(piece or b"", piece is None)
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{self._what}: not UTF-8: {error.reason}, after {shown(self._text[-40:])!r}") from None
        if piece is None:
            return False
        self._text = self._text[self._position :] + new
        self._before += self._position
        self._position = 0
        self._escapes = "\\u" in self._text
        self._decode = _PAIRS_MINUS_ZERO.raw_decode if "-0" in self._text else _PAIRS.raw_decode
        return True

    def _fault(self, words: str, error: Exception | None = None) -> CorruptFile:
        at = error.pos if isinstance(error, json.JSONDecodeError) else self._position
        return CorruptFile(f"{self._what}: {words}, at character {self._before + at}")


def refuse_ambiguous(value: object, *, what: str, max_depth: int = MAX_DEPTH) -> None:
    """Raise CorruptFile if `value` nests deeper than `max_depth`, or holds a duplicate key or half a surrogate pair."""
    level, depth = [value], 0
    while level:
        below: list[object] = []
        deeper = False
        for item in level:
            if isinstance(item, str):
                _refuse_lone_surrogates(item, what)
            elif isinstance(item, dict | tuple | list):
                deeper = True
                below.extend(item if isinstance(item, list) else _values_of(item, what))
        level, depth = below, depth + deeper
        if depth > max_depth:
            raise CorruptFile(f"{what}: JSON nested deeper than {max_depth} levels")


def json_kind(value: object) -> str:
    """Return what JSON calls `value`.

    >>> json_kind(True), json_kind([]), json_kind(None)
    ('a boolean', 'an array', 'null')
    """
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return kinds.get(type(value), "an object")


def json_text(value: object, depth: int = 8) -> str:
    """Return `value`, as `JsonStream` yields it, for a message: much like it stands in the file, `depth` levels of it.

    >>> json_text([2.0, True, (("a", None),)])
    '[2.0, true, {"a": null}]'
    """
    if isinstance(value, tuple | list) and not depth:
        return "…"
    if isinstance(value, tuple):
        return "{" + ", ".join(f"{json.dumps(key)}: {json_text(item, depth - 1)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(json_text(item, depth - 1) for item in value) + "]"
    return "-0" if isinstance(value, float) and str(value) == "-0.0" else json.dumps(value)


def _values_of(item: dict[str, Any] | Pairs, what: str) -> list[object]:
    pairs = item.items() if isinstance(item, dict) else item
    seen: set[str] = set()
    for key, _ in pairs:
        _refuse_lone_surrogates(key, what)
        if key in seen:
            raise CorruptFile(f"{what}: duplicate key {shown(key)!r}")
        seen.add(key)
    return [value for _, value in pairs]


def _refuse_lone_surrogates(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CorruptFile(f"{what}: lone surrogate in the string {shown(text)!r}") from None


def _decode_utf8(data: bytes, what: str) -> str:
    if data[:3] == b"\xef\xbb\xbf" or data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise CorruptFile(f"{what}: starts with a byte order mark; JSON here is UTF-8 without one")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{what}: not UTF-8 at byte {error.start}: {error.reason}") from None


def _in_words(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg}"
    if isinstance(error, RecursionError):
        return f"JSON nested deeper than {MAX_DEPTH} levels"
    if isinstance(error, IndexError):
        return "it ends early"
    return str(error) if isinstance(error, _Refused) else "not valid JSON: a number with thousands of digits"


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        again = {key: None for key, _ in pairs}
        twice = next(key for key, _ in pairs if again.pop(key, key) is not None)
        raise _Refused(f"duplicate key {shown(twice)!r}")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise _Refused(f"the number {shown(text)} is too large")
    return value


def _refuse_constant(text: str) -> float:
    raise _Refused(f"{text} is not JSON")


def _int_or_minus_zero(text: str) -> float:
    return -0.0 if text == "-0" else int(text)


_AFTER_VALUE = ",} \t\n\r"
_SPACE_OR_END = " \t\n\r"  # a slice past the end of a text is "", which is `in` it too
_SPACE = re.compile(r"[ \t\n\r]*")
_DICTS = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant)
_PAIRS = json.JSONDecoder(object_pairs_hook=tuple, parse_float=_finite, parse_constant=_refuse_constant)
_PAIRS_MINUS_ZERO = json.JSONDecoder(
    object_pairs_hook=tuple, parse_float=_finite, parse_int=_int_or_minus_zero, parse_constant=_refuse_constant
)
