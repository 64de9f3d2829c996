"""What a file really is, for the error that refuses it under a wrong name: `sniff`, and what a Git-LFS pointer says."""

from __future__ import annotations

import re
from typing import NamedTuple

from tensorferry.errors import shown
from tensorferry.formats.sniff import SNIFF_BYTES, describe_foreign

__all__ = ["HEAD_BYTES", "LfsPointer", "lfs_pointer", "looks_like"]

HEAD_BYTES = SNIFF_BYTES
"""How much of a file's start `looks_like` wants to see."""

_LFS_FIELD = re.compile(rb"^(oid|size) ([!-~]{1,200})$", re.MULTILINE)


class LfsPointer(NamedTuple):
    """What a Git-LFS pointer stands for: the object's id (``sha256:…``) and size, as the pointer says them."""

    oid: str
    size: str


def lfs_pointer(head: bytes) -> LfsPointer | None:
    """Return the pointer that `head` is, if it is one (https://git-lfs.com/spec: text, version line first)."""
    if not head.startswith(b"version https://git-lfs"):
        return None
    fields = {key.decode(): shown(value.decode()) for key, value in _LFS_FIELD.findall(head)}
    return LfsPointer(fields.get("oid", "unknown"), fields.get("size", "unknown"))


def looks_like(head: bytes) -> str | None:
    """Return in words what a file that starts with `head` is, and what to do; None if it is nothing well known.

    >>> looks_like(b"GGUF\\x03")
    'a GGUF file'
    """
    if pointer := lfs_pointer(head):
        return (
            f"a Git-LFS pointer for {pointer.oid} ({pointer.size} bytes), not the weights themselves; "
            "fetch them with `git lfs pull`"
        )
    return describe_foreign(head)
