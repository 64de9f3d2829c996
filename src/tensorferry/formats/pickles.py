"""A restricted interpreter of pickles: it describes what a pickle would build and never builds it.

Opcodes are those of https://docs.python.org/3/library/pickletools.html that binary pickles (protocols 1 to 5)
use. A global is looked up in a table of descriptions and in nothing else; what is not there is refused by name.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping

from tensorferry.formats.pickle_machine import (
    BLOCK,
    DICT_COST,
    MAX_MARKS,
    NO_STORAGES,
    NOTHING,
    Handler,
    Machine,
    Persistent,
)
from tensorferry.formats.pickle_values import BadValue, DictValue, LeftOut, Maker, SetValue
from tensorferry.formats.windows import Stream

__all__ = ["read_pickle"]


def read_pickle(stream: Stream, path: str, known: Mapping[str, object], persistent: Persistent = NO_STORAGES) -> object:
    """Interpret one pickle from `stream`, up to and including its STOP, and return the description of its object.

    path: the file, for messages. known: full names of globals to what they stand for: a Maker may be called, a
    Refused raises its error, any other value is passed on as it is.
    Raises CorruptFile for what is no well-formed pickle and UnsafeFile for a global that is not in `known`.
    """
    return Machine(stream, path, known, persistent).run(_HANDLERS)


_HANDLERS: list[Handler | None] = [None] * 256


def _op(code: bytes) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS[code[0]] = handler
        return handler

    return register


def _number(code: bytes, layout: str) -> None:
    unpack, size = struct.Struct(layout).unpack, struct.calcsize(layout)
    _HANDLERS[code[0]] = lambda m: m.stack.append(unpack(m.stream.take(size))[0])


def _sized(code: bytes, size: int, push: Callable[[Machine, int], None]) -> None:
    _HANDLERS[code[0]] = lambda m: push(m, int.from_bytes(m.stream.take(size), "little"))


def _fixed(code: bytes, make: Callable[[], object]) -> None:
    _HANDLERS[code[0]] = lambda m: m.stack.append(make())


def _new(code: bytes, make: Callable[[], object], cost: int) -> None:
    @_op(code)
    def container(m: Machine) -> None:
        m.spend(cost)
        m.stack.append(make())


def _last(code: bytes, count: int) -> None:
    @_op(code)
    def tuple_of_last(m: Machine) -> None:
        if len(m.stack) < count:
            raise IndexError
        m.stack[-count:] = [tuple(m.stack[-count:])]


for _code, _layout in ((b"J", "<i"), (b"K", "<B"), (b"M", "<H"), (b"G", ">d")):
    _number(_code, _layout)
for _code, _size, _push in (
    (b"X", 4, Machine.push_text),
    (b"\x8c", 1, Machine.push_text),
    (b"\x8d", 8, Machine.push_text),
    (b"B", 4, Machine.push_bytes),
    (b"C", 1, Machine.push_bytes),
    (b"\x8e", 8, Machine.push_bytes),
    (b"\x96", 8, Machine.push_bytes),
    (b"T", 4, Machine.push_python2_str),
    (b"U", 1, Machine.push_python2_str),
):
    _sized(_code, _size, _push)
for _code, _make in (
    (b"N", lambda: None),
    (b"\x88", lambda: True),
    (b"\x89", lambda: False),
    (b")", tuple),
):
    _fixed(_code, _make)
_new(b"]", list, 1)
_new(b"}", DictValue, DICT_COST)
_new(b"\x8f", SetValue, DICT_COST)
for _code, _count in ((b"\x85", 1), (b"\x86", 2), (b"\x87", 3)):
    _last(_code, _count)


@_op(b"\x80")
def _proto(m: Machine) -> None:
    if not 0 <= (version := m.stream.byte()) <= 5:
        raise BadValue(f"pickle protocol {version}, known are 0 to 5")


@_op(b"\x95")
def _frame(m: Machine) -> None:
    if int.from_bytes(m.stream.take(8), "little") > m.stream.remaining:
        raise BadValue("a frame is longer than the rest of the file: truncated?")


@_op(b"I")
def _int(m: Machine) -> None:
    line = m.stream.line()
    m.stack.append({b"00": False, b"01": True}.get(line) if line in (b"00", b"01") else _decimal(line))


@_op(b"L")
def _long(m: Machine) -> None:
    m.stack.append(_decimal(m.stream.line().removesuffix(b"L")))


def _decimal(line: bytes) -> int:
    if not re.fullmatch(rb"-?[0-9]{1,300}", line):
        raise BadValue("a number that is none")
    return int(line)


@_op(b"\x8a")
def _long1(m: Machine) -> None:
    m.push_made(int.from_bytes(m.stream.take(m.stream.byte()), "little", signed=True))


@_op(b"(")
def _mark(m: Machine) -> None:
    if len(m.frames) > MAX_MARKS:
        raise BadValue(f"more than {MAX_MARKS} values are begun and not ended")
    m.frames.append(m.stack)
    m.stack = []


@_op(b"0")
def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()


@_op(b"1")
def _pop_mark(m: Machine) -> None:
    m.pop_mark()


@_op(b"2")
def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


@_op(b"q")
def _binput(m: Machine) -> None:
    _memorize(m, m.stream.byte())


@_op(b"r")
def _long_binput(m: Machine) -> None:
    _memorize(m, int.from_bytes(m.stream.take(4), "little"))


@_op(b"\x94")
def _memoize(m: Machine) -> None:
    _memorize(m, len(m.memo))


def _memorize(m: Machine, index: int) -> None:
    if not m.memo.put(index, m.stack[-1]):
        m.spend(DICT_COST)


@_op(b"h")
def _binget(m: Machine) -> None:
    _recall(m, m.stream.byte())


@_op(b"j")
def _long_binget(m: Machine) -> None:
    _recall(m, int.from_bytes(m.stream.take(4), "little"))


def _recall(m: Machine, index: int) -> None:
    value = m.memo.get(index)
    if value is NOTHING:
        raise BadValue(f"it recalls value {index} of its memo, which was never put there")
    m.stack.append(value)


@_op(b"t")
def _tuple(m: Machine) -> None:
    items = tuple(m.pop_mark())
    m.stack.append(items)


@_op(b"l")
def _list(m: Machine) -> None:
    items = m.pop_mark()
    m.stack.append(items)


@_op(b"\x91")
def _frozenset(m: Machine) -> None:
    items = m.pop_mark()
    m.stack.append(SetValue(items))


@_op(b"a")
def _append(m: Machine) -> None:
    _extend_list(m, [m.stack.pop()])


@_op(b"e")
def _appends(m: Machine) -> None:
    _extend_list(m, m.pop_mark())


def _extend_list(m: Machine, items: list[object]) -> None:
    if not isinstance(target := m.stack[-1], list):
        raise BadValue("it appends to what is no list")
    target.extend(items)


@_op(b"\x90")
def _additems(m: Machine) -> None:
    items = m.pop_mark()
    if not isinstance(target := m.stack[-1], SetValue):
        raise BadValue("it adds to what is no set")
    target.elements.extend(items)


@_op(b"s")
def _setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_items(m, [key, value])


@_op(b"u")
def _setitems(m: Machine) -> None:
    _set_items(m, m.pop_mark())


def _set_items(m: Machine, items: list[object]) -> None:
    target = m.stack[-1]
    if not isinstance(target, DictValue) or len(items) % 2:
        raise BadValue("it sets items of what is no dict, or half an item")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target.set(key, value)


@_op(b"c")
def _global(m: Machine) -> None:
    module, name = m.stream.line(), m.stream.line()
    m.push_global(module.decode(errors="replace"), name.decode(errors="replace"))


@_op(b"\x93")
def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise BadValue("the name of a global is no text")
    m.push_global(module, name)


@_op(b"i")
def _inst(m: Machine) -> None:
    module, name = m.stream.line(), m.stream.line()
    raise m.unsafe(f"{module.decode(errors='replace')}.{name.decode(errors='replace')}")


def _extension(m: Machine) -> None:
    raise m.unsafe("the copyreg extension registry")


for _code in (b"\x82", b"\x83", b"\x84"):
    _op(_code)(_extension)


@_op(b"R")
def _reduce(m: Machine) -> None:
    args, maker = m.stack.pop(), m.stack.pop()
    if not isinstance(maker, Maker) or not isinstance(args, tuple):
        raise BadValue("it calls what is no function")
    m.spend(DICT_COST + sum(map(_weight, args)))
    m.stack.append(maker.make(args))


def _weight(argument: object) -> int:
    """Return what a call may have to look at or copy; one list can be passed to many calls."""
    match argument:
        case list() | tuple():
            return len(argument)
        case DictValue():
            return len(argument.items) + len(argument.rest)
        case str() | bytes():
            return len(argument) >> BLOCK
    return 0


@_op(b"\x81")
def _newobj(m: Machine) -> None:
    _reduce(m)


@_op(b"\x92")
def _newobj_ex(m: Machine) -> None:
    keywords = m.stack.pop()
    if not isinstance(keywords, DictValue) or keywords:
        raise BadValue("it makes an object with keywords, which no known type takes")
    _reduce(m)


@_op(b"b")
def _build(m: Machine) -> None:
    state, target = m.stack.pop(), m.stack[-1]
    if isinstance(target, LeftOut):
        target.held.append(state)
    elif isinstance(target, DictValue):
        target.state = state
    else:
        raise BadValue("it sets the state of a value that has none")


@_op(b"Q")
def _binpersid(m: Machine) -> None:
    m.stack.append(m.persistent(m.stack.pop()))
