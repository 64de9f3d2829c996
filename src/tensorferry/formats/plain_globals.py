"""The globals of Python and numpy that a checkpoint's pickle may name, each with what it is described as.

Whatever is in no such table is refused by name. The functions here only look at their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tensorferry.formats.pickle_values import BadValue, DictValue, LeftOut, Maker, SetValue, is_scalar

__all__ = ["PLAIN_GLOBALS", "Arguments"]

Arguments = tuple[object, ...]


def _dict(args: Arguments) -> DictValue:
    made = DictValue()
    match args:
        case ():
            return made
        case (list() as pairs,):  # Python 2 pickled an OrderedDict as a list of [key, value]
            for pair in pairs:
                if not isinstance(pair, list | tuple) or len(pair) != 2:
                    raise BadValue("an OrderedDict is made of something that is no pair")
                made.set(*pair)
            return made
        case (DictValue() as other,):
            return DictValue(dict(other.items), list(other.rest))
    raise BadValue("a dict is made of something that is none")


def _defaultdict(args: Arguments) -> DictValue:
    if len(args) > 1 or not all(arg is None or isinstance(arg, Maker) for arg in args):
        raise BadValue("a defaultdict has a default that is no plain type")
    return DictValue()


def _items(args: Arguments) -> list[object]:
    match args:
        case ():
            return []
        case (list() | tuple() as items,):
            return list(items)
    raise BadValue("a list, tuple or set is made of something that is none of them")


def _bytes(args: Arguments) -> bytes:
    match args:
        case ():
            return b""
        case (bytes() as data,):
            return data
        case (str() as text, str() as encoding) if encoding.lower() in ("latin1", "latin-1"):
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError:
                raise BadValue("text that stands for bytes is not latin-1") from None
    raise BadValue("bytes are made of something that is none")


def _encode(args: Arguments) -> object:
    match args:
        case (LeftOut() as long, str()):
            return long
        case (str(), str()):
            return _bytes(args)
    raise BadValue("_codecs.encode is used for something else than bytes as latin-1 text")


def _bytearray(args: Arguments) -> object:
    return args[0] if len(args) == 1 and isinstance(args[0], LeftOut) else _bytes(args)


def _complex(args: Arguments) -> complex:
    match args:
        case (float() | int() as real, float() | int() as imaginary) if max(abs(real), abs(imaginary)) < 1e308:
            return complex(real, imaginary)
        case (float() as real, float() as imaginary):
            return complex(real, imaginary)
    raise BadValue("a complex number is not made of two numbers")


def _scalar_of(kind: type[str | int | float | bool]) -> Callable[[Arguments], object]:
    def make(args: Arguments) -> object:
        if not args:
            return kind()
        if len(args) == 1 and type(args[0]) is kind:
            return args[0]
        raise BadValue(f"{kind.__name__} is called to convert a value, which no writer does")

    return make


def _left_out(kind: str) -> Callable[[Arguments], LeftOut]:
    return lambda args: LeftOut(kind, list(args))


def _dtype(args: Arguments) -> LeftOut:
    if not args or not is_scalar(args[0]):
        raise BadValue("a numpy dtype is not made from its name")
    return LeftOut("numpy dtype", list(args))


_MAKERS: dict[str, Callable[[Arguments], object]] = {
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": _defaultdict,
    "builtins.dict": _dict,
    "builtins.list": _items,
    "builtins.tuple": lambda args: tuple(_items(args)),
    "builtins.set": lambda args: SetValue(_items(args)),
    "builtins.frozenset": lambda args: SetValue(_items(args)),
    "builtins.str": _scalar_of(str),
    "builtins.int": _scalar_of(int),
    "builtins.float": _scalar_of(float),
    "builtins.bool": _scalar_of(bool),
    "builtins.complex": _complex,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "_codecs.encode": _encode,
    "numpy.dtype": _dtype,
    "numpy.core.multiarray.scalar": _left_out("numpy scalar"),
    "numpy.core.multiarray._reconstruct": _left_out("numpy array"),
    "numpy.core.numeric._frombuffer": _left_out("numpy array"),
    "argparse.Namespace": _left_out("argparse.Namespace"),
}

PLAIN_GLOBALS: Mapping[str, object] = MappingProxyType(
    {name: Maker(name, make) for name, make in _MAKERS.items()} | {"numpy.ndarray": LeftOut("numpy.ndarray")}
)
"""Full name (modules under their Python 3 and numpy 1 names) to what the pickle gets."""
