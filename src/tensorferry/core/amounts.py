"""Amounts in words: bytes, and how many of what."""

from __future__ import annotations

__all__ = ["counted", "human_bytes"]


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
