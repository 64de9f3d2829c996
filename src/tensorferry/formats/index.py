"""Shard indexes (``*.index.json``): which tensor lies in which file. What the shards hold is checked elsewhere."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from tensorferry.errors import CorruptFile, UnsafeFile, shown
from tensorferry.formats.strict_json import json_kind, parse_json_object
from tensorferry.storage.base import File, Storage

__all__ = ["MAX_INDEX_BYTES", "check_index_size", "parse_index", "read_index"]

MAX_INDEX_BYTES = 64 << 20
"""Larger indexes are refused unread; 90,000 tensors of a 700 GB checkpoint need 9 MB."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_ADVICE = "fetch it again, or remove it and name the files with allow_patterns"


def read_index(storage: Storage, file: File) -> dict[str, str]:
    """Return the weight map of the index `file`: tensor name to shard, as a path relative to the index's folder.

    Names are checked as text; that a shard exists, and lies inside the storage once links are followed, is for
    `Storage.stat`. Raises CorruptFile where the index is malformed or empty, UnsafeFile where a name leads out.
    """
    check_index_size(file)
    data = bytearray(file.size)
    storage.read_into(file.path, 0, memoryview(data))
    return parse_index(bytes(data), what=file.path)


def check_index_size(file: File) -> None:
    """Raise CorruptFile if `file` is too large, or too small, to be a shard index."""
    if not file.size:
        raise CorruptFile(f"{file.path}: 0 bytes: {_ADVICE}")
    if file.size > MAX_INDEX_BYTES:
        raise CorruptFile(f"{file.path}: {file.size:,} bytes; a shard index has at most {MAX_INDEX_BYTES:,}")


def parse_index(data: bytes, *, what: str) -> dict[str, str]:
    """Return the weight map in `data`. `what` opens every message: the index, as its storage calls it.

    >>> parse_index(b'{"weight_map": {"w": "model-00001-of-00001.safetensors"}}', what="model.safetensors.index.json")
    {'w': 'model-00001-of-00001.safetensors'}
    """
    weight_map = parse_json_object(data, what=what).get("weight_map")
    if weight_map is None:
        raise CorruptFile(f"{what}: no weight_map, so it names no shards: {_ADVICE}")
    if not isinstance(weight_map, dict):
        raise CorruptFile(f"{what}: weight_map must be a JSON object, found {json_kind(weight_map)}: {_ADVICE}")
    if not weight_map:
        raise CorruptFile(f"{what}: weight_map is empty, so it names no shards: {_ADVICE}")
    return _checked(weight_map, what)


def _checked(weight_map: dict[str, Any], what: str) -> dict[str, str]:
    """Return `weight_map` with each shard name checked once and kept once."""
    shards: dict[str, str] = {}
    checked: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            found = repr(shard) if isinstance(shard, str) else json_kind(shard)
            raise CorruptFile(f"{what}: tensor {shown(name)!r}: a file name is expected, found {found}")
        known = shards.get(shard)
        if known is None:
            _check_shard_name(shard, what)
            known = shards[shard] = shard
        checked[name] = known
    return checked


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
