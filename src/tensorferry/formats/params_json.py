"""``params.json``, which describes a model beside its consolidated files. Reads it and what follows from it for sizes.

Meta and Mistral write it; sources: their reference implementations, llama-models and mistral-inference. What it means
for a model of a library is said elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from tensorferry.errors import CorruptFile, LocateError, shown
from tensorferry.formats.strict_json import json_kind, parse_json_object
from tensorferry.storage.base import Storage
from tensorferry.storage.reading import read_bytes

__all__ = ["PARAMS_FILE", "Params", "Widths", "read_params"]

PARAMS_FILE = "params.json"

_MAX_BYTES = 1 << 20
_MAX_SIZE = 1 << 31

_SPELLINGS = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads", "intermediate_size": "hidden_dim", "rms_norm_eps": "norm_eps",
}  # fmt: skip
_EXPERTS = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"}


class Widths(NamedTuple):
    """Extents of tensors, None where the file does not say: of the hidden state, all queries, all keys (or values), and
    the inner layer of the feed-forward network (or of one expert).
    """

    dim: int | None = None
    queries: int | None = None
    keys: int | None = None
    hidden: int | None = None


@dataclass(frozen=True, slots=True)
class Params:
    """What a params.json says, or an object in it. Keys are those of Meta and Mistral, whichever spelling it has.

    where: opens messages. A key that is null counts as absent. Getters raise CorruptFile for a value of a wrong kind.
    """

    where: str
    data: Mapping[str, Any]

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def integer(self, key: str) -> int | None:
        """Return a whole number; text of digits, which some files have, is one."""
        value = self.data.get(key)
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
            return int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._wrong(key, "a whole number")

    def size(self, key: str) -> int | None:
        """Return a whole number that can be the extent of something."""
        value = self.integer(key)
        if value is None or 0 < value < _MAX_SIZE:
            return value
        raise self._wrong(key, f"a number from 1 to {_MAX_SIZE:,}")

    def number(self, key: str) -> float | None:
        """Return a finite number."""
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30:
            raise self._wrong(key, "a number")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """Return true or false."""
        value = self.data.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(key, "true or false")

    def word(self, key: str) -> str | None:
        """Return text that can be a name: not empty, short, and printable."""
        value = self.data.get(key)
        if value is None or (isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable()):
            return value
        raise self._wrong(key, "a word")

    def part(self, key: str) -> Params | None:
        """Return an inner object that is not empty."""
        value = self.data.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return Params(f"{self.where}: {key}", MappingProxyType(value))

    def widths(self) -> Widths:
        """Return the extents of tensors that it says or that follow from it."""
        heads, head = self.size("n_heads"), self.head_dim()
        shared = self.size("n_kv_heads") or heads
        return Widths(
            self.size("dim"),
            heads * head if heads and head else None,
            shared * head if shared and head else None,
            self.hidden_dim(),
        )

    def head_dim(self) -> int | None:
        """Return the extent of one head: as said, else an equal share of the hidden state."""
        dim, heads = self.size("dim"), self.size("n_heads")
        return self.size("head_dim") or (dim // heads if dim and heads else None)

    def hidden_dim(self) -> int | None:
        """Return the width of the feed-forward network: as said, else computed of ``dim`` as Meta's code does it.

        That is 8/3 of it, times ``ffn_dim_multiplier``, rounded down, and up to a multiple of ``multiple_of``, without
        which it is not known.

        >>> Params("params.json", {"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}).hidden_dim()
        28672
        """
        said, dim, multiple = self.size("hidden_dim"), self.size("dim"), self.size("multiple_of")
        if said is not None or dim is None or multiple is None:
            return said
        width = int(8 * dim / 3)
        multiplier = self.number("ffn_dim_multiplier")
        if multiplier is not None:
            if not 0 < multiplier < 1000:
                raise self._wrong("ffn_dim_multiplier", "a positive number")
            width = int(multiplier * width)
        return -(-width // multiple) * multiple

    def _wrong(self, key: str, expected: str) -> CorruptFile:
        value = self.data[key]
        found = repr(value) if isinstance(value, int | float | str) else json_kind(value)
        return CorruptFile(f"{self.where}: {shown(key)}: {expected} is expected, found {shown(found)}")


def read_params(storage: Storage) -> Params | None:
    """Return the params.json directly in `storage`; None where there is none. Raises CorruptFile."""
    try:
        file = storage.stat(PARAMS_FILE)
    except LocateError:
        return None
    if file.size > _MAX_BYTES:
        raise CorruptFile(f"{PARAMS_FILE}: {file.size:,} bytes; one that describes a model has at most {_MAX_BYTES:,}")
    data = parse_json_object(read_bytes(storage, file.path, 0, file.size), what=PARAMS_FILE)
    inner = data.get("model")
    return Params(PARAMS_FILE, MappingProxyType(_as_native(inner if isinstance(inner, dict) else data)))


def _as_native(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` under the usual keys: the first Mixtral came with those of transformers."""
    named = {_SPELLINGS.get(key, key): value for key, value in data.items() if key not in _EXPERTS}
    experts = {_EXPERTS[key]: value for key, value in data.items() if key in _EXPERTS}
    return {**named, "moe": experts} if experts and not data.get("moe") else named
