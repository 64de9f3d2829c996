"""The index and the headers of a Tensorizer file, each rule checked as it is read. Reads no tensor's bytes.

There is no specification: the layout is that of the `tensorizer` library, 2.12, class TensorSerializer. After magic,
version, flags and count comes an index of all tensors; then each tensor's header, which repeats what the index says
and adds hashes, and its bytes; at the end, eight zeros where another header would begin.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import NamedTuple

from tensorferry.core.boxes import Shape
from tensorferry.core.dtypes import DType
from tensorferry.errors import CorruptFile, UnknownFormat, UnsupportedDtype, shown
from tensorferry.formats.sniff import SNIFF_BYTES, describe_foreign
from tensorferry.formats.strict_json import parse_json_object
from tensorferry.formats.tensorizer_cursor import Cursor
from tensorferry.formats.tensorizer_sealed import Sealed, read_sealed
from tensorferry.formats.tensorizer_types import TENSORIZER_DTYPES, logical_shape
from tensorferry.formats.windows import Window
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import bring

__all__ = [
    "CRC32",
    "ENCRYPTED",
    "INDEX_START",
    "LONG_VERSION",
    "MAGIC",
    "MAX_INDEX",
    "MAX_PADDING",
    "MAX_TENSORS",
    "SHA256",
    "TYPED_INDEX",
    "Hash",
    "StoredTensor",
    "TensorKind",
    "TensorizerHeader",
    "is_encrypted",
    "read_header",
]

MAGIC = b"|TZR|"
INDEX_START = 73
"""Where the index begins: after magic, version, 32 bytes of flags, two sizes, the count and the index's length."""
LONG_VERSION = 5
"""The version of files, and of entries of their index, whose dimensions take 64 bits."""
ENCRYPTED, TYPED_INDEX = 1, 2
"""Flags: tensors are encrypted; each entry of the index says its version."""
CRC32, SHA256 = 0, 1
"""Numbers of the kinds of hashes."""

MAX_TENSORS = 1 << 15
"""Tensors in a file. The library's own index has room for some 8,000."""
MAX_INDEX = 8 << 20
"""Bytes that the entries of an index take together."""
MAX_PADDING = 1 << 16
"""Zero bytes that a header may hold so that what follows it is aligned."""

_LAST_VERSION = 5
_PATH = b"\x1e"  # begins a name that is a list in JSON
_META_VERSION = 4  # tensors without data
_SEALED_VERSION = 3  # always encrypted
_LEAST_ENTRY = 30  # bytes of an entry of the index: a name of one letter, no dimensions
_MAX_RANK = 64
_HASH_SIZES = {CRC32: 4, SHA256: 32}
_BLOCK = 1 << 14  # a header is some 150 bytes, and the next one may be far


class TensorKind(IntEnum):
    """What a tensor was where it was written: a module's parameter or buffer, or a value of a dictionary."""

    PARAMETER = 0
    BUFFER = 1
    STATE_DICT = 2


class Hash(NamedTuple):
    """A hash of a header and the bytes behind it. at: where in the header its value is, which counts as zeros."""

    kind: int
    at: int
    value: bytes


class StoredTensor(NamedTuple):
    """A tensor as index and header agree on it.

    shape: in elements. header, data: offsets in the file. length: bytes of data, 0 also where the file has none.
    sealed: how its bytes are encrypted, and which part of the header that takes; None in files that are not.
    """

    name: str
    kind: TensorKind
    dtype: DType
    shape: Shape
    header: int
    data: int
    length: int
    hashes: tuple[Hash, ...]
    sealed: Sealed | None

    @property
    def absent(self) -> bool:
        """Whether it has elements and the file no bytes of them: it was on torch's meta device."""
        return not self.length and 0 not in self.shape


@dataclass(frozen=True, slots=True)
class TensorizerHeader:
    """All headers of a file. tensors: in the order of their bytes. encrypted: whether these are."""

    version: int
    encrypted: bool
    tensors: tuple[StoredTensor, ...]


class _Described(NamedTuple):
    """What index and header both say. shape: as its bytes, which take less memory than its numbers."""

    name: bytes
    kind: int
    dtype: bytes
    shape: bytes


class _Indexed(NamedTuple):
    """An entry of the index. long: whether dimensions take 64 bits, in its header, too."""

    described: _Described
    long: bool
    header: int
    data: int
    length: int


def read_header(storage: Storage, file: File) -> TensorizerHeader:
    """Return what index and headers of `file` say.

    Raises UnknownFormat for a file that is none, or of a version, flag or hash that is not known; UnsupportedDtype for
    a type that is not in `TENSORIZER_DTYPES`; CorruptFile for what breaks a rule. Refusing a file costs a few MB.
    """
    window, what = _opened(storage, file)
    version, flags, count, length = _start(window, what)
    cursor = Cursor(window, INDEX_START, INDEX_START + length, what, "the index")
    index = _read_index(cursor, count, flags & TYPED_INDEX)
    _check_places(index, INDEX_START + length, window, what)
    encrypted = _encrypted(version, flags)
    bring(storage, file.path, ((entry.header, _BLOCK) for entry in index))
    tensors = tuple(_read_tensor(window, entry, version, encrypted, what) for entry in index)
    _refuse_twice(tensors, what)
    return TensorizerHeader(version, encrypted, tensors)


def is_encrypted(storage: Storage, file: File) -> bool:
    """Tell from its first bytes whether `file` is encrypted. Raises as `read_header`."""
    version, flags, _, _ = _start(*_opened(storage, file))
    return _encrypted(version, flags)


def _opened(storage: Storage, file: File) -> tuple[Window, str]:
    if file.size == 0:  # as a broken link or a pipe are listed too; `stat` has their own words
        file = storage.stat(file.path)
    return Window(storage, file, block=_BLOCK), f"{shown(file.path)} ({shown(storage.uri, 300)})"


def _encrypted(version: int, flags: int) -> bool:
    return version == _SEALED_VERSION or bool(flags & ENCRYPTED)


def _start(window: Window, what: str) -> tuple[int, int, int, int]:
    """Return version, flags, how many tensors there are, and how long their index is."""
    size = window.file.size
    head = window.read(0, min(size, SNIFF_BYTES))
    if not head:
        raise CorruptFile(f"{what}: it is empty, an unfinished download most likely")
    if not head.startswith(MAGIC):
        found = describe_foreign(head)
        raise UnknownFormat(f"{what}: not a Tensorizer file: {f'it is {found}' if found else f'starts {head[:5]!r}'}")
    if size < INDEX_START:
        raise CorruptFile(f"{what}: truncated: a Tensorizer file has at least {INDEX_START} bytes, this one {size}")
    version = int.from_bytes(head[5:9], "little")
    if not 1 <= version <= _LAST_VERSION:
        raise UnknownFormat(f"{what}: Tensorizer version {version}: 1 to {_LAST_VERSION} are known here")
    flags = int.from_bytes(head[9:41], "little")
    _check_flags(version, flags, what)
    count, length = struct.unpack_from("<QQ", head, 57)
    if length > size - INDEX_START:
        raise CorruptFile(
            f"{what}: truncated: an index of {length:,} bytes is declared, {size - INDEX_START:,} are left"
        )
    if count * _LEAST_ENTRY > length:
        raise CorruptFile(f"{what}: {count:,} tensors are declared, in an index of {length:,} bytes")
    if count > MAX_TENSORS:
        raise CorruptFile(f"{what}: {count:,} tensors, the limit is {MAX_TENSORS:,}")
    return version, flags, count, length


def _check_flags(version: int, flags: int, what: str) -> None:
    known = ENCRYPTED | TYPED_INDEX
    if flags & ~known:
        raise UnknownFormat(f"{what}: feature flags {flags:#x}: only {known:#x} are known here")
    if flags and version < _META_VERSION:
        raise CorruptFile(f"{what}: feature flags {flags:#x} in a file of version {version}, which has none")
    if flags & TYPED_INDEX and version < LONG_VERSION:
        raise CorruptFile(f"{what}: entries with versions in a file of version {version}: {LONG_VERSION} has them")


def _read_index(cursor: Cursor, count: int, typed: int) -> list[_Indexed]:
    index = []
    for number in range(1, count + 1):
        index.append(_indexed(cursor, f"entry {number} of {count} of the index", typed))
        if cursor.at > INDEX_START + MAX_INDEX:
            raise cursor.corrupt(f"what comes up to it takes over {MAX_INDEX:,} bytes, which is the limit")
    return index


def _indexed(cursor: Cursor, subject: str, typed: int) -> _Indexed:
    cursor.subject = subject
    version = cursor.number("I", "its version") if typed else 1
    if version not in (1, LONG_VERSION):
        raise UnknownFormat(f"{cursor.what}: {subject}: version {version}: 1 and {LONG_VERSION} are known here")
    name = _text(cursor, "H", "its name")
    described = _description(cursor, name, cursor.number("B", "its kind"), version == LONG_VERSION)
    header, data, length = cursor.numbers("QQQ", "its place")
    return _Indexed(described, version == LONG_VERSION, header, data, length)


def _text(cursor: Cursor, format: str, thing: str) -> bytes:
    return cursor.take(cursor.number(format, f"the length of {thing}"), thing)


def _description(cursor: Cursor, name: bytes, kind: int, long: bool) -> _Described:
    """Take dtype and dimensions, which follow `name` and `kind`."""
    dtype = _text(cursor, "B", "its dtype")
    rank = cursor.number("B", "its number of dimensions")
    if rank > _MAX_RANK:
        raise cursor.corrupt(f"it has {rank} dimensions, the limit is {_MAX_RANK}")
    return _Described(name, kind, dtype, cursor.take(rank * (8 if long else 4), "its dimensions"))


def _check_places(index: list[_Indexed], start: int, window: Window, what: str) -> None:
    """Raise unless headers and data follow each other without hole or overlap, from `start` to the end of the file."""
    end, size = start, window.file.size
    for entry in index:
        name = shown(repr(entry.described.name))
        if entry.header != end or entry.data <= entry.header:
            raise CorruptFile(
                f"{what}: tensor {name}: its header is said to be at byte {entry.header:,} and its data at "
                f"{entry.data:,}; what comes before ends at byte {end:,}"
            )
        end = entry.data + entry.length
        if end > size:
            raise CorruptFile(
                f"{what}: truncated: tensor {name} ends at byte {end:,}, the file has {size:,}, at least "
                f"{end - size:,} are missing; download it again"
            )
    if size - end < 8:
        raise CorruptFile(f"{what}: truncated: 8 bytes follow the last tensor, here {size - end}; download it again")
    if any(window.read(end, 8)):
        raise CorruptFile(f"{what}: another tensor follows at byte {end:,}, which the index does not have")


def _read_tensor(window: Window, entry: _Indexed, version: int, encrypted: bool, what: str) -> StoredTensor:
    """Return what the header of `entry` says, once that is what the index says."""
    cursor = Cursor(window, entry.header, entry.data, what, f"header of tensor {entry.described.name!r}")
    length, _, kind, size = cursor.numbers("QHBH", "how it begins")
    _agree(cursor, "length", length, entry.data - entry.header)
    there = _description(cursor, cursor.take(size, "its name"), kind, entry.long)
    for field in ("name", "kind", "dtype"):
        _agree(cursor, field, getattr(there, field), getattr(entry.described, field))
    dims = _dims(there.shape, entry.long)
    if there.shape != entry.described.shape:
        _agree(cursor, "shape", dims, _dims(entry.described.shape, entry.long))
    hashes = tuple(_hashes(cursor, entry.header))
    sealed = read_sealed(cursor, entry.length) if encrypted else None
    _skip_padding(cursor)
    _agree(cursor, "data length", cursor.number("q", "its data length"), entry.length)
    dtype = _dtype(cursor, there.dtype)
    name, shape = _name(cursor, there), _shape(cursor, dtype, dims)
    made = StoredTensor(name, TensorKind(kind), dtype, shape, entry.header, entry.data, entry.length, hashes, sealed)
    if entry.length != dtype.nbytes(shape) and not (made.absent and version >= _META_VERSION):
        wanted = dtype.nbytes(shape)
        raise cursor.corrupt(f"{dtype} of shape {list(shape)} takes {wanted:,} bytes, its data has {entry.length:,}")
    return made


def _dims(data: bytes, long: bool) -> Shape:
    return struct.unpack(f"<{len(data) // 8}Q" if long else f"<{len(data) // 4}I", data)


def _agree(cursor: Cursor, field: str, there: object, indexed: object) -> None:
    if there != indexed:
        raise cursor.corrupt(f"its {field} is {shown(repr(there))}, and the index says {shown(repr(indexed))}")


def _hashes(cursor: Cursor, header: int) -> Iterator[Hash]:
    """Yield the hashes that the header has, each kind once."""
    length, count = cursor.numbers("HB", "the number of its hashes")
    end, seen = cursor.at - 1 + length, set()
    for _ in range(count):
        kind, size = cursor.numbers("BB", "the kind of a hash")
        if _HASH_SIZES.get(kind) != size:
            raise UnknownFormat(f"{cursor.what}: {shown(cursor.subject)}: a hash of kind {kind} with {size} bytes")
        if kind in seen:
            raise cursor.corrupt(f"two hashes of kind {kind}")
        seen.add(kind)
        yield Hash(kind, cursor.at - header, cursor.take(size, "a hash"))
    if cursor.at != end:
        raise cursor.corrupt(f"its hashes end at byte {cursor.at:,}, their length says {end:,}")


def _skip_padding(cursor: Cursor) -> None:
    padding = cursor.left - 8
    if padding > MAX_PADDING:
        raise cursor.corrupt(f"{padding:,} bytes of padding, the limit is {MAX_PADDING:,}")
    if padding > 0 and any(cursor.take(padding, "padding")):
        raise cursor.corrupt("its padding is not all zeros")


def _dtype(cursor: Cursor, text: bytes) -> DType:
    found = TENSORIZER_DTYPES.get(text.decode("latin-1"))
    if found is None:
        raise UnsupportedDtype(f"{cursor.what}: {shown(cursor.subject)}: dtype {shown(repr(text))} is not read here")
    return found


def _shape(cursor: Cursor, dtype: DType, dims: Shape) -> Shape:
    shape = logical_shape(dtype, dims)
    if shape is None:
        raise cursor.corrupt(f"a scalar of {dtype}, of which a byte holds {dtype.block}")
    if prod(max(dim, 1) for dim in shape) * dtype.block_bytes >= 1 << 63:
        raise cursor.corrupt(f"the shape {shown(str(list(dims)))} overflows 64 bits")
    return shape


def _name(cursor: Cursor, there: _Described) -> str:
    """Return the name of a tensor; keys and numbers that lead to it through dictionaries and lists join with dots."""
    if there.kind > max(TensorKind):
        raise cursor.corrupt(f"its kind is {there.kind}: 0, 1 and 2 are known here")
    if there.name[:1] == _PATH and there.kind == TensorKind.STATE_DICT:
        return _joined(cursor, there.name[1:])
    try:
        name = there.name.decode()
    except UnicodeDecodeError:
        raise cursor.corrupt("its name is not UTF-8") from None
    if there.kind != TensorKind.STATE_DICT:
        name = name.removeprefix(".")  # the library puts a dot after the root module's name, which is empty
    if not name:
        raise cursor.corrupt("its name is empty")
    return name


def _joined(cursor: Cursor, text: bytes) -> str:
    path = parse_json_object(b'{"path":' + text + b"}", what=f"{cursor.what}: {shown(cursor.subject)}").get("path")
    if not isinstance(path, list) or not path or not all(_is_step(step) for step in path):
        raise cursor.corrupt("its name is no list of keys and numbers")
    return ".".join(map(str, path))


def _is_step(step: object) -> bool:
    return isinstance(step, str) or (isinstance(step, int) and not isinstance(step, bool) and step >= 0)


def _refuse_twice(tensors: tuple[StoredTensor, ...], what: str) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise CorruptFile(f"{what}: duplicate name: a tensor {shown(tensor.name)!r} is there twice")
        seen.add(tensor.name)
