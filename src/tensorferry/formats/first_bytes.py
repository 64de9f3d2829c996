"""What a file really is, told from how it starts, for the error that refuses it under a wrong name."""

from __future__ import annotations

import re
from typing import NamedTuple

from tensorferry.errors import shown

__all__ = ["HEAD_BYTES", "LfsPointer", "lfs_pointer", "looks_like"]

HEAD_BYTES = 512
"""How much of a file's start `looks_like` wants to see."""

_LFS_FIELD = re.compile(rb"^(oid|size) ([!-~]{1,200})$", re.MULTILINE)

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes it; its name should end in .bin or .pt"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"GGUF", "a GGUF file; its name should end in .gguf"),
    (b"\x93NUMPY", "a NumPy array; its name should end in .npy"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it"),
    (b"\x1f\x8b", "gzip-compressed; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed; unpack it first"),
    (b"\xfd7zXZ\x00", "xz-compressed; unpack it first"),
    (b"\xef\xbb\xbf", "text with a byte order mark"),
)
_PICKLES = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")


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
    'a GGUF file; its name should end in .gguf'
    """
    if pointer := lfs_pointer(head):
        return (
            f"a Git-LFS pointer for {pointer.oid} ({pointer.size} bytes), not the weights themselves; "
            "fetch them with `git lfs pull`"
        )
    for magic, words in _MAGIC:
        if head.startswith(magic):
            return words
    if head.startswith(_PICKLES):
        return "a pickle, as torch.save writes it; its name should end in .bin or .pt"
    return _text_or_zeros(head)


def _text_or_zeros(head: bytes) -> str | None:
    start = head.lstrip()[:16].lower()
    if start.startswith(_PAGES):
        return "an HTML or XML page: the download got a web page (log-in, error) instead of the file; download it again"
    if start.startswith((b"{", b"[")):
        return "JSON text from its first byte on: an error message or an index, saved under this name"
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    if len(head) >= 8 and not any(head):
        return "only zeros where it starts: an unfinished download, most likely; download it again"
    return None
