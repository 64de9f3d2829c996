"""What the first bytes of a file say it is."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from safetensors.torch import save

from helpers.checkpoints import ar
from helpers.torch_files import legacy, saved
from tensorferry.formats.sniff import SNIFF_BYTES, LfsPointer, describe_foreign, lfs_pointer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n"


def npy() -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    np.save(buffer, np.zeros(2))
    return buffer.getvalue()


KNOWN = {
    "Git-LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "an HTML page": b"\xef\xbb\xbf\n<HTML lang=en>",
    "an XML document": b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>",
    "JSON text": b'{"error": "not found"}',
    "a safetensors file": save({"w": ar(2)}),
    "a GGUF file": b"GGUF" + struct.pack("<I", 3),
    "a NumPy .npy file": npy(),
    "a zip archive": saved({"w": ar(2)}),
    "a legacy torch file": legacy({"w": ar(2)}),
    "a Python pickle": b"\x80\4K\1.",
    "a tar archive": b"x" * 257 + b"ustar\x0000",
    "gzip": b"\x1f\x8b\x08\0",
    "zstd": b"\x28\xb5\x2f\xfd\0",
    "an HDF5 file": b"\x89HDF\r\n\x1a\n",
    "a CTranslate2 model": b"\6\0\0\0\x10\0TransformerSpec\0",
    "all zeros": b"\0" * 4096,
}


@pytest.mark.parametrize(("words", "data"), KNOWN.items(), ids=KNOWN)
def test_says_what_a_file_is(words: str, data: bytes) -> None:
    assert words in (describe_foreign(data[:SNIFF_BYTES]) or "")


@pytest.mark.parametrize("data", [b"", b"\1", b"weights", b"\x80", b"<", b"\xff" * 600])
def test_is_silent_about_what_it_does_not_know(data: bytes) -> None:
    assert describe_foreign(data) is None


def test_a_pointer_says_what_it_stands_for() -> None:
    assert lfs_pointer(POINTER) == LfsPointer("sha256:abc", "12345")
    assert "sha256:abc (12345 bytes)" in str(describe_foreign(POINTER))


def test_a_cut_pointer_is_still_one() -> None:
    assert lfs_pointer(POINTER[:45]) == LfsPointer("unknown", "unknown")


def test_text_that_only_speaks_of_pointers_is_none() -> None:
    assert lfs_pointer(b"\n" + POINTER) is None


def test_a_few_bytes_are_enough_where_there_is_a_magic_number() -> None:
    assert describe_foreign(b"GGUF\x03\0\0\0") == "a GGUF file"
    assert describe_foreign(b"\x12\x34\x56") is None
