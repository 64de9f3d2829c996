"""How .npy files are read: as NumPy writes them, held against NumPy itself, and nothing evaluated."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest

from helpers.memory_storage import MemoryStorage
from helpers.npy_bytes import npy
from tensorferry.core.dtypes import DTYPES, Kind
from tensorferry.execute.simple import read_entry
from tensorferry.formats.npy import NPY_DTYPES, NpyFormat, NpyHeader, npy_header, read_header

SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (2, 3), (0,), (3, 0, 2), (2, 3, 4)]


def saved(array: np.ndarray[Any, Any]) -> bytes:
    out = BytesIO()
    np.save(out, array)
    return out.getvalue()


def header_of(data: bytes) -> NpyHeader:
    storage = MemoryStorage({"a": data})
    return read_header(storage, storage.stat("a"))


def values(data: bytes) -> np.ndarray[Any, Any]:
    storage = MemoryStorage({"a": data})
    found: np.ndarray[Any, Any] = read_entry(storage, NpyFormat().catalogue(storage, storage.stat("a"))["a"]).numpy()
    return found


@pytest.mark.parametrize("descr", NPY_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_numpy_saves_is_read_as_numpy_reads_it(descr: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(descr)
    found = values(saved(array))
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (1, 5), (5, 1), (4,), (0, 3)])
def test_an_array_in_fortran_order_comes_out_by_value(shape: tuple[int, ...]) -> None:
    array = np.asfortranarray(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    assert np.array_equal(values(saved(array)), array)


def test_the_strides_of_fortran_order_are_the_first_dimension_s_fastest() -> None:
    assert header_of(saved(np.asfortranarray(np.zeros((2, 3, 4), np.int16)))).strides == (1, 2, 6)
    assert header_of(saved(np.zeros((2, 3, 4), np.int16))).strides is None


@pytest.mark.parametrize("descr", NPY_DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (100_000,)])
def test_a_header_is_written_byte_for_byte_as_numpy_writes_it(descr: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, descr)
    assert npy_header(NPY_DTYPES[descr], shape) + array.tobytes() == saved(array)


def test_bits_are_written_as_numpy_writes_items_of_raw_bytes() -> None:
    assert npy_header(DTYPES["BF16"], (2, 3)) + bytes(12) == saved(np.zeros((2, 3), "V2"))
    assert npy_header(DTYPES["F8_E4M3"], (5,)) + bytes(5) == saved(np.zeros(5, "V1"))


def test_items_of_raw_bytes_are_a_type_that_nobody_knows() -> None:
    found = header_of(saved(np.zeros((2, 3), "V2")))
    assert (found.dtype.kind, found.dtype.block_bytes, found.shape) == (Kind.UNKNOWN, 2, (2, 3))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format_is_read(version: tuple[int, int]) -> None:
    out = BytesIO()
    np.lib.format.write_array(out, np.arange(3, dtype="<i4"), version)
    assert values(out.getvalue()).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "header",
    [
        "{'shape': (2,), 'fortran_order': False, 'descr': '<i2'}\n",
        "{'descr':'<i2','fortran_order':False,'shape':(2,)}\n",
        '{"descr": "<i2", "fortran_order": False, "shape": (2, ), }\n',
        "{ 'descr' : '<i2' , 'fortran_order' : False , 'shape' : ( 2 , ) , }" + " " * 300 + "\n",
    ],
)
def test_a_dictionary_may_be_written_in_other_ways(header: str) -> None:
    assert values(npy(header, b"\x01\0\x02\0")).tolist() == [1, 2]


def test_only_the_header_is_read() -> None:
    storage = MemoryStorage({"a": saved(np.zeros((1000, 1000)))})
    read_header(storage, storage.stat("a"))
    assert sum(length for _, _, length in storage.reads) <= 256
