"""Hostile .npy files: each rule of the format broken by itself. Nothing is evaluated, and refusing costs little."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from helpers.memory_storage import MemoryStorage
from helpers.npy_bytes import npy
from tensorferry.errors import CorruptFile, FormatError, UnknownFormat, UnsafeFile, UnsupportedDtype
from tensorferry.formats.npy import MAX_HEADER, read_header


def line(descr: str = "'<f4'", order: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


GOOD = npy(line(), bytes(8))


def refused(data: bytes, kind: type[FormatError], words: str) -> None:
    storage = MemoryStorage({"bad": data})
    with pytest.raises(kind, match=words) as refusal:
        read_header(storage, storage.stat("bad"))
    assert type(refusal.value) is kind
    assert str(refusal.value).startswith("bad (memory)")
    assert len(str(refusal.value)) < 500


def test_the_file_that_is_spoilt_below_is_good() -> None:
    storage = MemoryStorage({"good": GOOD})
    assert read_header(storage, storage.stat("good")).shape == (2,)


@pytest.mark.parametrize("size", range(len(GOOD)))
def test_a_file_that_was_cut_anywhere_is_refused(size: int) -> None:
    storage = MemoryStorage({"bad": GOOD[:size]})
    with pytest.raises(FormatError, match="bad"):
        read_header(storage, storage.stat("bad"))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\x93NUMPX" + GOOD[6:], "not a NumPy"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git-LFS pointer"),
        (b"<!DOCTYPE html><html>", "HTML page"),
    ],
)
def test_what_is_no_npy_file_is_called_by_its_name(data: bytes, words: str) -> None:
    refused(data, UnknownFormat, words)


@pytest.mark.parametrize("version", [(0, 0), (1, 1), (2, 1), (4, 0), (255, 255)])
def test_other_versions_are_refused(version: tuple[int, int]) -> None:
    refused(GOOD[:6] + bytes(version) + GOOD[8:], CorruptFile, f"version {version[0]}.{version[1]}")


def test_a_header_may_take_10_000_bytes_and_not_one_more() -> None:
    longest = line()[:-1] + " " * (MAX_HEADER - len(line())) + "\n"
    storage = MemoryStorage({"good": npy(longest, bytes(8), version=(2, 0))})
    assert read_header(storage, storage.stat("good")).shape == (2,)
    refused(npy(" " + longest, bytes(8), version=(2, 0)), CorruptFile, "a header of 10001 bytes; at most 10000")


@pytest.mark.parametrize("length", [10_001, 2**31, 2**32 - 1])
def test_a_header_of_a_size_that_cannot_be_is_refused_unread(length: int) -> None:
    refused(npy(line(), bytes(8), version=(3, 0), length=length), CorruptFile, f"a header of {length} bytes")


def test_a_header_that_ends_after_the_file_is_refused() -> None:
    refused(npy(line(), bytes(8), length=9_000), CorruptFile, "truncated: the header ends at byte 9010")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "\n",
        "{",
        "{\n",
        "()\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }",  # no line feed
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} 1\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}}\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,),, }\n",
        "{'descr': '<f4', 'fortran_order': False 'shape': (2,), }\n",
        "{'descr': '<f4', 'fortran_order': False}\n",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': True}\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': __import__('os').system('true')}\n",
        "dict(descr='<f4', fortran_order=False, shape=(2,))\n",
        "{'descr': '<f4' '', 'fortran_order': False, 'shape': (2,)}\n",
        "{'descr': '\\x3cf4', 'fortran_order': False, 'shape': (2,)}\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} # (3,)\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}\0\n",
        "{'d\xe9scr': '<f4', 'fortran_order': False, 'shape': (2,)}\n",
    ],
)
def test_a_header_that_is_no_such_dictionary_is_refused(header: str) -> None:
    refused(npy(header, bytes(8)), CorruptFile, "header")


@pytest.mark.parametrize("order", ["0", "1", "None", "'False'", "false", "(1,)"])
def test_an_order_that_is_neither_true_nor_false_is_refused(order: str) -> None:
    refused(npy(line(order=order), bytes(8)), CorruptFile, "fortran_order|cannot be read")


@pytest.mark.parametrize(
    "shape",
    [
        *("2", "(2)", "[2]", "(-2,)", "(2.0,)", "(2L,)", "(0x2,)", "(02,)", "(2_0,)", "(,)", "(2,,)", "(2 2,)", "True"),
        *("'2'", "(9223372036854775808,)", f"({'9' * 5000},)", f"({'1, ' * 65})"),
    ],
)
def test_a_shape_that_is_no_tuple_of_sizes_is_refused(shape: str) -> None:
    refused(npy(line(shape=shape), bytes(8), version=(2, 0)), CorruptFile, "shape|cannot be read|dimensions")


@pytest.mark.parametrize("shape", ["(3,)", "(1,)", "()", "(0,)", "(2, 2)", "(9223372036854775807,)"])
def test_a_length_that_is_not_that_of_the_shape_is_refused(shape: str) -> None:
    refused(npy(line(shape=shape), bytes(8)), CorruptFile, "truncated|bytes after its end|63 bits")


def test_sizes_whose_product_wraps_are_refused() -> None:
    refused(npy(line(shape="(4294967296, 4294967296)")), CorruptFile, "63 bits")
    refused(npy(line(shape=f"({'9223372036854775807, ' * 64})"), version=(2, 0)), CorruptFile, "63 bits")


@pytest.mark.parametrize("descr", ["'|O'", "'O'", "'<O8'", "'|O8'"])
def test_python_objects_are_refused_and_not_unpickled(descr: str) -> None:
    refused(npy(line(descr, shape="(1,)"), bytes(8)), UnsafeFile, "Python objects")


def test_an_array_of_objects_that_numpy_saved_runs_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (str(tmp_path / "ran"),))

    out = BytesIO()
    np.save(out, np.array([Bomb()], dtype=object), allow_pickle=True)
    assert pickle.STOP in out.getvalue()
    refused(out.getvalue(), UnsafeFile, "Python objects")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("descr", ["'<U4'", "'|S8'", "'<M8[s]'", "'<m8'", "'<f16'", "'<c32'", "'f4'", "'=f4'", "'<f3'"])
def test_types_that_no_tensor_has_are_refused(descr: str) -> None:
    refused(npy(line(descr), bytes(8)), UnsupportedDtype, "elements of the type")


@pytest.mark.parametrize("descr", ["'|V0'", "'|V10000'", "'|V'", "'>V2'", "'', '", "''"])
def test_items_of_no_size_are_refused(descr: str) -> None:
    storage = MemoryStorage({"bad": npy(line(descr), bytes(8))})
    with pytest.raises(FormatError, match="bad"):
        read_header(storage, storage.stat("bad"))


@pytest.mark.parametrize("descr", ["'>f4'", "'>i8'", "'>u2'", "'>c16'"])
def test_the_other_byte_order_is_refused_with_what_to_do(descr: str) -> None:
    refused(npy(line(descr), bytes(8)), UnsupportedDtype, "big-endian order.*save the array with '<")


def test_records_are_refused() -> None:
    out = BytesIO()
    np.save(out, np.zeros(2, [("a", "<f4"), ("b", "<i2")]))
    refused(out.getvalue(), UnsupportedDtype, "records")


@pytest.mark.parametrize("unit", ["(", "[", "{'a':", "'", "1,", " ", "\\", "'descr': '<f4',", "\n"])
def test_refusing_a_longest_header_costs_little(unit: str) -> None:
    storage = MemoryStorage({"bad": npy("{" + unit * (9_990 // len(unit)) + "\n", version=(2, 0))})
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="bad"):
            read_header(storage, storage.stat("bad"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert time.process_time() - began < 1
