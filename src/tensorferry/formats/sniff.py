"""Tells by its first bytes what a file is when it is not what its name says. Decides nothing: it only finds words."""

from __future__ import annotations

import re
from typing import NamedTuple

from tensorferry.errors import shown

__all__ = ["SNIFF_BYTES", "LfsPointer", "describe_foreign", "lfs_pointer"]

SNIFF_BYTES = 512
"""How many first bytes of a file `describe_foreign` wants; fewer are fine where the file is shorter."""

_MAGIC = (
    (b"GGUF", "a GGUF file"),
    (b"FUGG", "a GGUF file of the other byte order"),
    (b"\x93NUMPY", "a NumPy .npy file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"|TZR|", "a Tensorizer file"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes them"),
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "a legacy torch file"),
    (b"\x1f\x8b", "a gzip-compressed file: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd-compressed file: unpack it first"),
    (b"\xfd7zXZ\x00", "an xz-compressed file: unpack it first"),
    (b"BZh", "a bzip2-compressed file: unpack it first"),
    (b"\x7fELF", "an ELF executable or library"),
)
_HTML = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_XML = re.compile(rb"(?:\xef\xbb\xbf)?\s*<\?xml\b", re.IGNORECASE)
_SAFETENSORS = re.compile(rb"\{\s*(?:\}|\"(?!\Z))", re.DOTALL)
_CTRANSLATE2 = re.compile(rb"[\x01-\x0f]\0\0\0.\0[A-Z][A-Za-z0-9]+(?:Spec)?\0", re.DOTALL)
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
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


def describe_foreign(first_bytes: bytes) -> str | None:
    """Return what a file that begins with `first_bytes` is, in words that finish "it is …", or None if unknown.

    Formats that tensorferry reads are recognised too: a reader asks only after its own check has failed.

    >>> describe_foreign(b"<!DOCTYPE html><html>")
    'an HTML page: the download was answered with a page (a login or an error), not with the file'
    >>> describe_foreign(b"1234") is None
    True
    """
    head = first_bytes[:SNIFF_BYTES]
    if head and not head.strip(b"\0"):
        return "all zeros at its start: a download that reserved its space and did not finish"
    if pointer := lfs_pointer(head):
        return (
            f"a Git-LFS pointer for {pointer.oid} ({pointer.size} bytes), not the weights themselves; "
            "fetch them with `git lfs pull`"
        )
    for magic, words in _MAGIC:
        if head.startswith(magic):
            return words
    return _by_pattern(head)


def _by_pattern(head: bytes) -> str | None:
    if _HTML.match(head):
        return "an HTML page: the download was answered with a page (a login or an error), not with the file"
    if _XML.match(head):
        return "an XML document, such as an object store's error message"
    if head[257:262] == b"ustar":
        return "a tar archive"
    if _looks_like_safetensors(head):
        return "a safetensors file"
    if _CTRANSLATE2.match(head):
        return "a CTranslate2 model"
    if _PICKLE.match(head):
        return "a Python pickle"
    if head[:1] in (b"{", b"["):
        return "JSON text"
    return None


def _looks_like_safetensors(head: bytes) -> bool:
    length = int.from_bytes(head[:8], "little")
    return 2 <= length <= 100_000_000 and _SAFETENSORS.match(head[8:]) is not None
