"""What a caller wants of a conversion, checked before anything is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, TypeAlias, get_args

from tensorferry.checks import expect
from tensorferry.config import DTYPES as NAMES_OF_DTYPES
from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.core.plan import Strictness
from tensorferry.errors import ConfigError

__all__ = ["DEFAULT_SHARD", "Names", "WantedConversion", "parse_size"]

Names: TypeAlias = Literal["auto", "hf", "keep"]
"""Which names tensors get: those of transformers' checkpoints where the source has other ones that are known here
("auto"), those or an error ("hf"), or the source's own ("keep")."""

DEFAULT_SHARD = "5GB"

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_TORCH_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
STRICT = Strictness(unexpected="error")


def parse_size(text: str | int) -> int:
    """Return how many bytes are meant. Raises ConfigError for what is no size.

    >>> parse_size("5GB"), parse_size("500MiB"), parse_size("1.5 kB"), parse_size(4096)
    (5000000000, 524288000, 1500, 4096)
    """
    found = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is not None:
        number, power, binary = found.groups()
        size = int(Decimal(number) * (1024 if binary else 1000) ** _POWERS[power.lower()])
    else:
        size = text if isinstance(text, int) and not isinstance(text, bool) else 0
    if size < 1 or (found is not None and found[3] and not found[2]):
        raise ConfigError(f"max_shard_size {text!r}: a number of bytes is expected, such as 5GB, 500MiB or 1000000")
    return size


@dataclass(frozen=True, slots=True)
class WantedConversion:
    """Settled options of a conversion. to: the name of a writer. dtype: what floating tensors become, or None.

    max_shard_size: in bytes, None for no limit.
    """

    to: str
    dtype: DType | None = None
    max_shard_size: int | None = None
    names: Names = "auto"
    strict: Strictness = field(default_factory=lambda: STRICT)
    overwrite: bool = False
    verify: bool = True
    sha256sums: bool = False

    @classmethod
    def of(
        cls, *, to: Any, dtype: Any, max_shard_size: Any, names: Any, strict: Any, **flags: Any
    ) -> WantedConversion:  # Any: they are checked here
        """Return what is wanted. Raises ConfigError for an option of a wrong type or value."""
        if not isinstance(to, str) or not to:
            raise ConfigError(f"to {to!r}: the name of a format is expected")
        if names not in get_args(Names):
            raise ConfigError(f"names {names!r}: one of {', '.join(get_args(Names))} is expected")
        expect("strict", STRICT if strict is None else strict, Strictness, "a Strictness")
        for name, value in flags.items():
            expect(name, value, bool, "true or false")
        size = None if max_shard_size is None else parse_size(max_shard_size)
        return cls(to, _dtype(dtype), size, names, STRICT if strict is None else strict, **flags)


def _dtype(given: Any) -> DType | None:
    if given is None:
        return None
    text = str(given).removeprefix("torch.")
    if text not in NAMES_OF_DTYPES:
        raise ConfigError(f"dtype {given!r}: one of {', '.join(NAMES_OF_DTYPES)} is expected")
    return DTYPES[_TORCH_DTYPES[NAMES_OF_DTYPES[text]]]
