"""Headers of NumPy's .npy files, read by a strict parser of our own, and written as NumPy writes them.

The format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html (magic, version, length, the literal
of a Python dictionary, then the elements). Nothing is evaluated, and no array is read here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from tensorferry.core.boxes import Shape
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES, DType, Kind
from tensorferry.errors import CorruptFile, UnknownFormat, UnsafeFile, UnsupportedDtype, shown
from tensorferry.formats.sniff import SNIFF_BYTES, describe_foreign
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import read_bytes

__all__ = ["MAX_HEADER", "MAX_RANK", "NPY_DTYPES", "NpyFormat", "NpyHeader", "items_of", "npy_header", "read_header"]

MAX_HEADER = 10_000
"""Bytes that a header may take, which is also what NumPy reads of files that are not trusted."""

MAX_RANK = 64
"""Dimensions that an array may have; neither torch nor NumPy has more."""

NPY_DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        "|b1": DTYPES["BOOL"],
        "|u1": DTYPES["U8"],
        "|i1": DTYPES["I8"],
        "<u2": DTYPES["U16"],
        "<u4": DTYPES["U32"],
        "<u8": DTYPES["U64"],
        "<i2": DTYPES["I16"],
        "<i4": DTYPES["I32"],
        "<i8": DTYPES["I64"],
        "<f2": DTYPES["F16"],
        "<f4": DTYPES["F32"],
        "<f8": DTYPES["F64"],
        "<c8": DTYPES["C64"],
        "<c16": DTYPES["C128"],
    }
)
"""The types of elements that NumPy and tensorferry share, by how a header spells them."""

_MAGIC = b"\x93NUMPY"
_LENGTHS = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}
_KEYS = ("descr", "fortran_order", "shape")
_FIRST_READ = 256  # nearly every header is 128 bytes with all that comes before it
_INT64_MAX = 2**63 - 1
_MOST_DIGITS = 19
_GROWTH = 21  # digits that NumPy leaves room for, so that the first dimension can be written anew in place
_ALIGNMENT = 64

_DESCR = {dtype: descr for descr, dtype in NPY_DTYPES.items()}
_ITEMS = re.compile(r"[<|]V([1-9][0-9]{0,3})")
_MEMBER = re.compile(
    r"""[ \t\n]*(?:'(?P<key>[a-z_]{1,40})'|"(?P<other>[a-z_]{1,40})")[ \t\n]*:[ \t\n]*"""
    r"""(?P<value>'[^'\\\n]*'|"[^"\\\n]*"|True|False|\([0-9, \t\n]*\)|\[[^\n]*\])[ \t\n]*(?P<end>[,}])"""
)
_END = re.compile(r"[ \t\n]*\}?[ \t\n]*")


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What the header of a file says, proven against the size of the file.

    dtype: of the elements; items of raw bytes have an unknown type, of their size. shape: in elements.
    fortran: whether the first index is the fastest. begin: where in the file the elements begin.
    """

    dtype: DType
    shape: Shape
    fortran: bool
    begin: int

    @property
    def strides(self) -> Shape | None:
        """In elements; None where they lie row-major."""
        if not self.fortran or not prod(self.shape):
            return None
        return tuple(prod(self.shape[:axis]) for axis in range(len(self.shape)))


class NpyFormat:
    """The `FileFormat` of single arrays: a catalogue of one entry, called like the file."""

    name = "npy"

    def catalogue(self, storage: Storage, file: File) -> Catalogue:
        """Return the array of `file`; raises what `read_header` raises."""
        found = read_header(storage, file)
        entry = TensorEntry.at(file.path, found.dtype, found.shape, file.path, found.begin, strides=found.strides)
        return Catalogue([entry], format=self.name, files=(file.path,))


def read_header(storage: Storage, file: File) -> NpyHeader:
    """Return what the header of `file` says. Reads no more than the header.

    Raises CorruptFile where a rule of the format is broken or the elements do not end with the file, UnsafeFile for
    Python objects, which are pickled, UnsupportedDtype for other types that no tensor has, UnknownFormat for what is
    no .npy file.
    """
    what = f"{shown(file.path)} ({shown(storage.uri, 300)})"
    head = read_bytes(storage, file.path, 0, min(file.size, _FIRST_READ))
    begin, length = _header_place(head, file.size, what)
    text = head[begin : begin + length]
    if len(text) < length:
        text += read_bytes(storage, file.path, begin + len(text), length - len(text))
    members = dict(_members(text, what))
    dtype, shape = _dtype(members["descr"], what), _shape(members["shape"], what)
    header = NpyHeader(dtype, shape, _flag(members["fortran_order"], what), begin + length)
    _check_length(header, file.size, what)
    return header


def items_of(size: int) -> DType:
    """Return the type of items of `size` raw bytes, whose meaning the file does not say."""
    return DType(f"V{size}", Kind.UNKNOWN, size)


def npy_header(dtype: DType, shape: Shape) -> bytes:
    """Return what comes before the elements of a row-major array, byte for byte as ``numpy.save`` writes it.

    dtype: one of `NPY_DTYPES`, or any other of whole bytes, whose blocks become items of raw bytes. shape: in items.

    >>> npy_header(DTYPES["BF16"], (2,))[10:64]
    b"{'descr': '|V2', 'fortran_order': False, 'shape': (2,)"
    """
    descr = _DESCR.get(dtype, f"|V{dtype.block_bytes}")
    shape = tuple(shape)  # a torch.Size writes itself in another way
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (_GROWTH - len(str(shape[0])) if shape else 0)
    before = len(_MAGIC) + 4
    text += " " * (-(before + len(text) + 1) % _ALIGNMENT) + "\n"
    return _MAGIC + bytes((1, 0)) + struct.pack("<H", len(text)) + text.encode("ascii")


def _header_place(head: bytes, size: int, what: str) -> tuple[int, int]:
    """Return where the header begins and how long it is; it ends inside the file."""
    if not head.startswith(_MAGIC):
        found = describe_foreign(head[:SNIFF_BYTES]) or ("empty" if not head else "of another kind")
        raise UnknownFormat(f"{what}: not a NumPy .npy file: it is {found}")
    version = tuple(head[6:8])
    if len(version) < 2:
        raise CorruptFile(f"{what}: truncated: the file has {size} bytes, and a .npy header over 10")
    length_type = _LENGTHS.get((version[0], version[1]))
    if length_type is None:
        raise CorruptFile(f"{what}: version {version[0]}.{version[1]} of the .npy format; there are 1.0, 2.0 and 3.0")
    begin = 8 + struct.calcsize(length_type)
    if size < begin:
        raise CorruptFile(f"{what}: truncated: the file has {size} bytes, and its header begins at {begin}")
    (length,) = struct.unpack_from(length_type, head, 8)
    if length > MAX_HEADER:
        raise CorruptFile(f"{what}: a header of {length} bytes; at most {MAX_HEADER} are read")
    if begin + length > size:
        raise CorruptFile(f"{what}: truncated: the header ends at byte {begin + length}, the file has {size}")
    return begin, int(length)


def _members(header: bytes, what: str) -> Iterator[tuple[str, str]]:
    """Yield key and value, as they are written, of the dictionary; each of `_KEYS` once and nothing else."""
    if not header.isascii():
        raise CorruptFile(f"{what}: the header is not plain ASCII: {shown(repr(header))}")
    text = header.decode("ascii")
    if not text.endswith("\n") or not text.startswith("{"):
        raise CorruptFile(f"{what}: the header is not the line of a dictionary: {shown(text)!r}")
    seen: list[str] = []
    at, end = 1, ","
    while end == "," and (match := _MEMBER.match(text, at)) is not None:
        key = match["key"] or match["other"]
        if key not in _KEYS or key in seen:
            raise CorruptFile(f"{what}: the header has {shown(key)!r} {'twice' if key in seen else 'and should not'}")
        seen.append(key)
        at, end = match.end(), match["end"]
        yield key, match["value"]
    rest = _END.fullmatch(text, at)
    if rest is None or (end == "}") == ("}" in rest[0]):
        raise CorruptFile(f"{what}: the header cannot be read from character {at}: {shown(text[at:])!r}")
    if len(seen) != len(_KEYS):
        absent = ", ".join(key for key in _KEYS if key not in seen)
        raise CorruptFile(f"{what}: the header lacks {absent}")


def _flag(value: str, what: str) -> bool:
    if value not in ("True", "False"):
        raise CorruptFile(f"{what}: fortran_order is {shown(value)!r}, not True or False")
    return value == "True"


def _shape(value: str, what: str) -> Shape:
    """Return the dimensions that the literal of a tuple lists, within 63 bits."""
    if value[0] != "(":
        raise CorruptFile(f"{what}: shape is {shown(value)!r}, not a tuple")
    parts = [part.strip() for part in value[1:-1].split(",")]
    if parts[-1] == "":
        parts.pop()
    elif len(parts) == 1:
        raise CorruptFile(f"{what}: shape is {shown(value)!r}, which is no tuple without a comma")
    if len(parts) > MAX_RANK:
        raise CorruptFile(f"{what}: {len(parts)} dimensions; an array has at most {MAX_RANK}")
    for part in parts:
        plain = part.isdigit() and len(part) <= _MOST_DIGITS and (part == "0" or part[0] != "0")
        if not plain or int(part) > _INT64_MAX:
            raise CorruptFile(f"{what}: the dimension {shown(part)!r} of shape {shown(value)} is no size")
    return tuple(map(int, parts))


def _dtype(value: str, what: str) -> DType:
    """Return the type that `value`, a literal, spells; of raw bytes, an unknown one of that size."""
    if value[0] not in "'\"":
        raise UnsupportedDtype(f"{what}: arrays of records are no tensors: descr is {shown(value)}")
    descr = value[1:-1]
    if descr in NPY_DTYPES:
        return NPY_DTYPES[descr]
    if (raw := _ITEMS.fullmatch(descr)) is not None:
        return items_of(int(raw[1]))
    if descr.lstrip("<>|=").startswith("O"):
        raise UnsafeFile(f"{what}: holds Python objects ({shown(descr)}), a pickle that would be executed: refused")
    if descr[:1] == ">" and f"<{descr[1:]}" in NPY_DTYPES:
        raise UnsupportedDtype(f"{what}: elements in big-endian order ({descr}): save the array with '<{descr[1:]}'")
    raise UnsupportedDtype(f"{what}: elements of the type {shown(descr)!r}, which no tensor has")


def _check_length(header: NpyHeader, size: int, what: str) -> None:
    nbytes = header.dtype.nbytes(header.shape)
    declared = f"{header.dtype} of shape {shown(str(header.shape))}"
    if nbytes > _INT64_MAX:
        raise CorruptFile(f"{what}: {declared} takes over 63 bits of bytes")
    end = header.begin + nbytes
    if end != size:
        kind = "truncated" if end > size else "bytes after its end"
        raise CorruptFile(f"{what}: {kind}: {declared} ends at byte {end}, the file has {size}")
