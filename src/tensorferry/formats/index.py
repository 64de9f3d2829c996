"""Shard indexes (``*.index.json``): which tensor lies in which file. What the shards hold is checked elsewhere."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator

from tensorferry.errors import CorruptFile, UnsafeFile, shown
from tensorferry.formats.strict_json import JsonStream, json_kind, refuse_ambiguous
from tensorferry.storage.base import File, Storage
from tensorferry.storage.reading import read_bytes

__all__ = ["MAX_INDEX_BYTES", "check_index_size", "parse_index", "read_index"]

MAX_INDEX_BYTES = 64 << 20
"""Larger indexes are refused unread; 90,000 tensors of a 700 GB checkpoint need 9 MB."""

_MAX_TENSORS = 1 << 20
_MAX_SHARDS = 1 << 15
_MEMBER_LIMIT = 1 << 20  # characters of a name with its shard, or of anything beside the weight map
_WINDOW = 1 << 20
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_ADVICE = "fetch it again, or remove it and name the files with allow_patterns"


def read_index(storage: Storage, file: File) -> dict[str, str]:
    """Return the weight map of the index `file`: tensor name to shard, as a path relative to the index's folder.

    Names are checked as text; that a shard exists, and lies inside the storage once links are followed, is for
    `Storage.stat`. The index is read in pieces up to its first fault, so what refusing it costs is what the sound
    names before that take.

    Raises CorruptFile where the index is malformed or empty, UnsafeFile where a name leads out.
    """
    check_index_size(file)
    return _parsed(_windows(storage, file), shown(file.path))


def check_index_size(file: File) -> None:
    """Raise CorruptFile if `file` is too large, or too small, to be a shard index."""
    if not file.size:
        raise CorruptFile(f"{shown(file.path)}: 0 bytes: {_ADVICE}")
    if file.size > MAX_INDEX_BYTES:
        raise CorruptFile(f"{shown(file.path)}: {file.size:,} bytes; a shard index has at most {MAX_INDEX_BYTES:,}")


def parse_index(data: bytes, *, what: str) -> dict[str, str]:
    """Return the weight map in `data`. `what` opens every message: the index, as its storage calls it.

    >>> parse_index(b'{"weight_map": {"w": "model-00001-of-00001.safetensors"}}', what="model.safetensors.index.json")
    {'w': 'model-00001-of-00001.safetensors'}
    """
    return _parsed((data[at : at + _WINDOW] for at in range(0, len(data), _WINDOW)), shown(what))


def _windows(storage: Storage, file: File) -> Iterator[bytes]:
    for at in range(0, file.size, _WINDOW):
        yield read_bytes(storage, file.path, at, min(_WINDOW, file.size - at))


def _parsed(pieces: Iterable[bytes], what: str) -> dict[str, str]:
    stream = JsonStream(pieces, what=what)
    weight_map: dict[str, str] | None = None
    seen: set[str] = set()
    for key, value in stream.members(limit=_MEMBER_LIMIT, descend="weight_map"):
        if key in seen:
            raise CorruptFile(f"{what}: duplicate key {shown(key)!r}")
        seen.add(key)
        if key == "weight_map":
            weight_map = _weight_map(stream, what)
        else:
            refuse_ambiguous(value, what=what)
    stream.end()
    if weight_map is None:
        raise CorruptFile(f"{what}: no weight_map, so it names no shards: {_ADVICE}")
    return weight_map


def _weight_map(stream: JsonStream, what: str) -> dict[str, str]:
    """Return the names in the object that comes next, with each shard name checked once and kept once."""
    if (begin := stream.peek()) != "{":
        raise CorruptFile(f"{what}: weight_map must be a JSON object, found {begin!r}: {_ADVICE}")
    shards: dict[str, str] = {}
    found: dict[str, str] = {}
    for name, shard in stream.members(limit=_MEMBER_LIMIT):
        if not isinstance(shard, str) or not shard:
            kind = repr(shard) if isinstance(shard, str) else json_kind(shard)
            raise CorruptFile(f"{what}: tensor {shown(name)!r}: a file name is expected, found {kind}")
        if name in found:
            raise CorruptFile(f"{what}: duplicate key {shown(name)!r} in weight_map")
        known = shards.get(shard)
        if known is None:
            _check_shard_name(shard, what)
            known = shards[shard] = shard
        found[name] = known
        if len(found) > _MAX_TENSORS or len(shards) > _MAX_SHARDS:
            raise CorruptFile(
                f"{what}: it names over {_MAX_TENSORS:,} tensors or {_MAX_SHARDS:,} shards: no checkpoint"
            )
    if not found:
        raise CorruptFile(f"{what}: weight_map is empty, so it names no shards: {_ADVICE}")
    return found


def _check_shard_name(shard: str, what: str) -> None:
    fault = _fault_of(shard)
    if fault is not None:
        raise UnsafeFile(f"{what}: names the shard {shown(shard)!r}, which {fault}: nothing was read from there")


def _fault_of(shard: str) -> str | None:
    """Return what makes `shard` no plain path below its folder, as words that follow "which", or None."""
    parts = shard.split("/")
    if "\0" in shard:
        return "holds a NUL byte"
    if "\\" in shard:
        return "holds a backslash"
    if shard.startswith("/"):
        return "is an absolute path"
    if ".." in parts:
        return "leads out of the folder"
    if _SCHEME.match(shard):
        return "is a URL or a drive, not a file of the folder"
    if posixpath.normpath(shard) != shard:
        return "is not in its normal form"
    if any(part.startswith(".") for part in parts):
        return "is a dot file, never weights"
    return None
