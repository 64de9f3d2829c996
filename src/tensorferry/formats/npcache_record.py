"""The two JSON files of a NumPy cache: the names in order, and our record of what it holds and what it was made of.

Also what a tensor's file is called. Which cache is to be believed, `npcache` decides.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensorferry.core.boxes import Shape
from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.errors import CorruptFile, FormatError, UnknownFormat, UnsafeFile, shown
from tensorferry.formats.strict_json import JsonStream, parse_json_strings, refuse_ambiguous
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import read_bytes

__all__ = [
    "FOLDER",
    "MAX_TENSORS",
    "NAMES",
    "RECORD",
    "CacheRecord",
    "CachedTensor",
    "SourceFile",
    "file_name_of",
    "names_bytes",
    "path_of",
    "read_names",
    "read_record",
    "record_bytes",
]

FOLDER = "np"
"""Where in a checkpoint's folder its cache lies."""

NAMES = "weight_names.json"
"""What vLLM calls the list of the cache's files, which are called like the tensors."""

RECORD = "tensorferry.json"
"""What is ours: the types, and the files that the cache was made of."""

MAX_TENSORS = 65_536
"""Tensors that a cache may hold, so that refusing one stays cheap."""

_VERSION = 1
_KEYS = ("format", "version", "sources", "metadata", "tensors")
_MAX_NAMES = 8 << 20
_MAX_RECORD = 32 << 20
_MEMBER_LIMIT = 1 << 20
_WINDOW = 1 << 20
_MOST_METADATA = 1 << 19  # characters; more is left out

_LONGEST_READ = 255
_LONGEST_WRITTEN = 200  # bytes: the file is written under a longer name that begins with a dot
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_QUOTED = re.compile(r"[/\\\0%:]")


class SourceFile(NamedTuple):
    """A file that a cache was made of. mtime_ns: when it was last written to, in nanoseconds since 1970."""

    name: str
    size: int
    mtime_ns: int


class CachedTensor(NamedTuple):
    """A tensor of a cache: its name, and type and shape as the model has them."""

    name: str
    dtype: DType
    shape: Shape


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """What a cache says of itself. tensors: by the name of the file, in order. sources: what it was made of."""

    tensors: Mapping[str, CachedTensor]
    sources: Sequence[SourceFile] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


def path_of(file: str) -> str:
    """Return the path, relative to the checkpoint's folder, of a file of its cache."""
    return f"{FOLDER}/{file}"


def file_name_of(tensor: str) -> str:
    """Return what the file of a tensor is called: as the tensor is, where that is a plain file name, else escaped.

    Raises FormatError for a name that is no text.

    >>> file_name_of("model.norm.weight"), file_name_of("a/b"), file_name_of("..")
    ('model.norm.weight', 'a%2Fb', '%2E.')
    """
    try:
        size = len(tensor.encode())
    except UnicodeEncodeError:
        raise FormatError(f"tensor {shown(tensor)!r}: half a surrogate pair is no text") from None
    if _fault_of(tensor) is None and "%" not in tensor and size <= _LONGEST_WRITTEN:
        return tensor
    quoted = _QUOTED.sub(lambda match: f"%{ord(match[0]):02X}", tensor)
    if quoted[:1] in (".", "") or tensor in (NAMES, RECORD):
        quoted = f"%{ord(tensor[0]):02X}{quoted[1:]}" if tensor else "%"
    data = quoted.encode()
    if len(data) <= _LONGEST_WRITTEN:
        return quoted
    return f"{data[: _LONGEST_WRITTEN - 80].decode(errors='ignore')}%{hashlib.sha256(tensor.encode()).hexdigest()}"


def read_names(storage: Storage, file: File) -> list[str]:
    """Return the file names that ``weight_names.json`` lists, each a plain name and there once.

    Raises CorruptFile, and UnsafeFile for a name that leads out of the folder.
    """
    what = _refuse_size(storage, file, _MAX_NAMES)
    names = parse_json_strings(read_bytes(storage, file.path, 0, file.size), what=what, most=MAX_TENSORS)
    seen: set[str] = set()
    for name in names:
        _refuse_odd_name(name, what)
        if name in seen:
            raise CorruptFile(f"{what}: {shown(name)!r} is listed twice")
        seen.add(name)
    return names


def read_record(storage: Storage, file: File) -> CacheRecord:
    """Return our record, read in pieces up to its first fault.

    Raises CorruptFile for what is malformed, UnsafeFile for names that lead out of the folder, UnknownFormat for a
    version that is not known here.
    """
    what = _refuse_size(storage, file, _MAX_RECORD)
    stream = JsonStream(_windows(storage, file), what=what)
    tensors: dict[str, CachedTensor] | None = None
    rest: dict[str, Any] = {}
    for key, value in stream.members(limit=_MEMBER_LIMIT, descend="tensors"):
        if key in rest or key not in _KEYS:
            raise CorruptFile(f"{what}: {'duplicate' if key in rest else 'unknown'} key {shown(key)!r}")
        rest[key] = value
        if key == "tensors":
            tensors = _tensors(stream, what)
        else:
            refuse_ambiguous(value, what=what)
    stream.end()
    if rest.get("format") != "npcache" or type(rest.get("version")) is not int or tensors is None:
        raise CorruptFile(f"{what}: not the record of a NumPy cache")
    if rest["version"] != _VERSION:
        raise UnknownFormat(f"{what}: version {rest['version']} of the record; version {_VERSION} is known here")
    return CacheRecord(tensors, tuple(_sources(rest.get("sources"), what)), _metadata(rest.get("metadata", ()), what))


def names_bytes(record: CacheRecord) -> bytes:
    """Return ``weight_names.json`` of a cache, as vLLM writes it."""
    return json.dumps(list(record.tensors)).encode()


def record_bytes(record: CacheRecord) -> bytes:
    """Return our record as JSON; metadata that takes over half a megabyte is left out.

    Raises FormatError for names that are no text, and where there are more tensors than `read_record` takes.
    """
    metadata = dict(record.metadata)
    if sum(len(key) + len(value) for key, value in metadata.items()) > _MOST_METADATA:
        metadata = {}
    data = {
        "format": "npcache",
        "version": _VERSION,
        "sources": [source._asdict() for source in record.sources],
        "metadata": metadata,
        "tensors": {file: _told(file, held) for file, held in record.tensors.items()},
    }
    try:
        text = json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"lone surrogate in a name or in the metadata: {shown(error.object)!r}") from None
    if len(text) > _MAX_RECORD or len(record.tensors) > MAX_TENSORS:
        raise FormatError(f"{len(record.tensors)} tensors are too many for a NumPy cache, which holds {MAX_TENSORS}")
    return text


def _told(file: str, held: CachedTensor) -> dict[str, Any]:
    name = {} if held.name == file else {"name": held.name}
    return {**name, "dtype": held.dtype.name, "shape": list(held.shape)}


def _refuse_size(storage: Storage, file: File, most: int) -> str:
    """Return what messages call the file; raises CorruptFile where it is empty or larger than such files are."""
    what = f"{shown(file.path)} ({shown(storage.uri, 300)})"
    if not 0 < file.size <= most:
        raise CorruptFile(f"{what}: {file.size} bytes, where 1 to {most} are expected")
    return what


def _windows(storage: Storage, file: File) -> Iterator[bytes]:
    for at in range(0, file.size, _WINDOW):
        yield read_bytes(storage, file.path, at, min(_WINDOW, file.size - at))


def _tensors(stream: JsonStream, what: str) -> dict[str, CachedTensor]:
    found: dict[str, CachedTensor] = {}
    if stream.peek() != "{":
        raise CorruptFile(f"{what}: tensors must be a JSON object")
    for file, value in stream.members(limit=_MEMBER_LIMIT):
        _refuse_odd_name(file, what)
        if file in found:
            raise CorruptFile(f"{what}: duplicate key {shown(file)!r}")
        found[file] = _held(file, value, what)
        if len(found) > MAX_TENSORS:
            raise CorruptFile(f"{what}: over {MAX_TENSORS} tensors")
    return found


def _held(file: str, value: object, what: str) -> CachedTensor:
    told = _object(value, f"tensor {shown(file)!r}", what)
    name, shape = told.get("name", file), told.get("shape")
    dtype = DTYPES.get(str(told.get("dtype")))
    if not isinstance(name, str) or dtype is None or not isinstance(shape, list):
        raise CorruptFile(f"{what}: tensor {shown(file)!r}: name, dtype and shape are expected")
    if not all(type(dim) is int and dim >= 0 for dim in shape):
        raise CorruptFile(f"{what}: tensor {shown(file)!r}: a shape is a list of sizes")
    refuse_ambiguous(name, what=what)
    return CachedTensor(name, dtype, tuple(shape))


def _sources(value: object, what: str) -> Iterator[SourceFile]:
    if not isinstance(value, list):
        raise CorruptFile(f"{what}: sources must be a JSON array")
    for item in value:
        told = _object(item, "a source", what)
        kinds = [type(told.get(key)) for key in SourceFile._fields]
        if kinds != [str, int, int] or len(told) != len(kinds):
            raise CorruptFile(f"{what}: name, size and mtime_ns of each source are expected")
        yield SourceFile(**told)


def _metadata(value: object, what: str) -> dict[str, str]:
    told = _object(value, "metadata", what)
    if not all(isinstance(text, str) for text in told.values()):
        raise CorruptFile(f"{what}: metadata must map text to text")
    return told


def _object(value: object, whose: str, what: str) -> dict[str, Any]:
    """Return an object that a `JsonStream` read as pairs."""
    if not isinstance(value, tuple):
        raise CorruptFile(f"{what}: {whose}: a JSON object is expected")
    told = dict(value)
    if len(told) != len(value):
        raise CorruptFile(f"{what}: {whose}: a duplicate key")
    return told


def _refuse_odd_name(name: str, what: str) -> None:
    fault = _fault_of(name)
    if fault is not None:
        raise UnsafeFile(f"{what}: names the file {shown(name)!r}, which {fault}: nothing was read from there")


def _fault_of(name: str) -> str | None:
    """Return what makes `name` none of a file directly in its folder that may hold a tensor, after "which"."""
    faults: Iterable[tuple[bool, str]] = (
        (not name, "is empty"),
        (name.startswith("."), "is a dot file, never weights"),
        (any(c in name for c in "/\\\0"), "holds a slash, a backslash or a NUL byte"),
        (_SCHEME.match(name) is not None, "is a URL or a drive, not a file of the folder"),
        (name in (NAMES, RECORD), "is no tensor"),
        (len(name.encode(errors="replace")) > _LONGEST_READ, "is longer than file names are"),
    )
    return next((words for found, words in faults if found), None)
