"""What the first bytes of a file say of it, beyond the magic numbers that `sniff` knows."""

from __future__ import annotations

from tensorferry.formats.first_bytes import LfsPointer, lfs_pointer, looks_like

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n"


def test_a_pointer_says_what_it_stands_for() -> None:
    assert lfs_pointer(POINTER) == LfsPointer("sha256:abc", "12345")
    assert "sha256:abc (12345 bytes)" in str(looks_like(POINTER))


def test_a_cut_pointer_is_still_one() -> None:
    assert lfs_pointer(POINTER[:45]) == LfsPointer("unknown", "unknown")


def test_text_that_only_speaks_of_pointers_is_none() -> None:
    assert lfs_pointer(b"\n" + POINTER) is None


def test_other_files_are_told_too() -> None:
    assert looks_like(b"GGUF\x03\0\0\0") == "a GGUF file"
    assert looks_like(b"\x12\x34\x56") is None
