"""Options that have another type or value than they may: told before anything is done."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.errors import ConfigError

__all__ = ["expect", "expect_one_of"]


def expect(name: str, value: object, kind: type, expected: str) -> None:
    """Raise ConfigError where the option `name` is of another type; `expected` says of which it should be."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} {value!r}: {expected} is expected, not {type(value).__name__}")


def expect_one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Raise ConfigError where the option `name` has another value than those that are known."""
    if value not in known:
        raise ConfigError(f"{name} {value!r}: one of {', '.join(known)} is expected")
