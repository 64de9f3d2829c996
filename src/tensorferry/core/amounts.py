"""Amounts in words: bytes, how many of what, and the first few of many."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["counted", "few", "human_bytes"]


def human_bytes(n: int) -> str:
    """Return `n` bytes in binary units.

    >>> human_bytes(3 << 20), human_bytes(512)
    ('3.0 MiB', '512 B')
    """
    value, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(value)} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def counted(number: int, what: str) -> str:
    """Return `number` of `what`, in the singular or the plural.

    >>> counted(1, "file"), counted(2000, "file")
    ('1 file', '2,000 files')
    """
    return f"{number:,} {what}" + "s" * (number != 1)


def few(texts: Iterable[str], most: int, *, between: str = ", ", what: str = "") -> str:
    """Return the first `most` texts in a row, and how many more there are; `what` they are is said in the singular.

    >>> few(["a", "b", "c"], 3), few(["a", "b", "c"], 2), few(["a", "b"], 1, between="; ", what="file")
    ('a, b, c', 'a, b and 1 more', 'a; and 1 more file')
    """
    every = list(texts)
    row = between.join(every[:most])
    if len(every) <= most:
        return row
    more = len(every) - most
    last = counted(more, f"more {what}") if what else f"{more:,} more"
    return f"{row} and {last}" if between == ", " else f"{row}{between}and {last}"
