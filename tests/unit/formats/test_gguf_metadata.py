"""Metadata of GGUF files come typed, compact, and checked where they are used."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from helpers.gguf_bytes import (
    ARRAY,
    BOOL,
    DOUBLE,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    NAME,
    STRING,
    U8,
    U16,
    U32,
    U64,
    T,
    array,
    gguf,
    kv,
    s,
)
from helpers.measuring import MIB, little_memory, little_time
from helpers.memory_storage import MemoryStorage
from tensorferry.errors import CorruptFile
from tensorferry.formats.gguf_header import read_header, read_metadata
from tensorferry.formats.gguf_metadata import GgufMetadata, Texts, ValueType, shortest


def metadata(*pairs: bytes, order: str = "<") -> GgufMetadata:
    storage = MemoryStorage({NAME: gguf((), pairs, order=order)})
    return read_metadata(storage, storage.list()[0])


SINGLE: list[tuple[int, Any]] = [
    (U8, 255),
    (I8, -128),
    (U16, 65_535),
    (I16, -32_768),
    (U32, 2**32 - 1),
    (I32, -(2**31)),
    (FLOAT, 0.5),
    (BOOL, True),
    (STRING, "é\n"),
    (U64, 2**64 - 1),
    (I64, -(2**63)),
    (DOUBLE, 0.1),
]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("kind", "value"), SINGLE)
def test_every_type_of_value_is_read(kind: int, value: Any, order: str) -> None:
    found = metadata(kv("k", kind, value, order), order=order)
    assert found["k"] == value
    assert type(found["k"]) is type(value)
    assert found.typed("k").type is ValueType(kind)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("kind", "value"), SINGLE)
def test_every_type_of_array_is_read(kind: int, value: Any, order: str) -> None:
    found = metadata(kv("k", ARRAY, array(kind, [value, value], order), order), order=order)
    assert list(found["k"]) == [value, value]
    assert found.typed("k").element is ValueType(kind)


def test_arrays_of_arrays_are_tuples() -> None:
    found = metadata(kv("k", ARRAY, array(ARRAY, [array(U8, [1, 2]), array(STRING, ["x"])])))
    assert [list(inner) for inner in found["k"]] == [[1, 2], ["x"]]


def test_empty_arrays_are_empty() -> None:
    found = metadata(kv("n", ARRAY, array(FLOAT, [])), kv("t", ARRAY, array(STRING, [])))
    assert (list(found["n"]), list(found["t"])) == ([], [])


def test_keys_keep_their_order() -> None:
    assert list(metadata(kv("z", U8, 1), kv("a", U8, 2))) == ["z", "a"]


def test_texts_are_a_sequence() -> None:
    texts = metadata(kv("k", ARRAY, array(STRING, ["a", "", "ccc"]))).texts("k")
    assert isinstance(texts, Texts)
    assert (len(texts), texts[0], texts[-1], texts[1:], list(texts)) == (3, "a", "ccc", ("", "ccc"), ["a", "", "ccc"])
    assert ("ccc" in texts, texts.index("ccc"), texts.raw(2)) == (True, 2, b"ccc")
    with pytest.raises(IndexError):
        texts[3]


def test_bytes_that_are_no_utf8_are_kept() -> None:
    found = metadata(kv("one", STRING, s(b"a\xff")), kv("many", ARRAY, array(STRING, [b"\xff\xfe"])))
    assert found["one"].encode("utf-8", "surrogateescape") == b"a\xff"
    assert found["many"].raw(0) == found["many"][0].encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_arrays_cannot_be_changed() -> None:
    for order in "<>":
        numbers = metadata(kv("k", ARRAY, array(U16, [1], order), order), order=order)["k"]
        with pytest.raises(TypeError, match="read-only"):
            numbers[0] = 2


def test_values_are_checked_where_they_are_used() -> None:
    found = metadata(
        kv("i", I32, -1),
        kv("f", FLOAT, 1e-6),
        kv("b", BOOL, 0),
        kv("s", STRING, "x"),
        kv("ints", ARRAY, array(U16, [1])),
        kv("floats", ARRAY, array(FLOAT, [0.5])),
        kv("flags", ARRAY, array(BOOL, [1])),
        kv("texts", ARRAY, array(STRING, ["x"])),
    )
    readers = {
        "integer": ("i", -1), "number": ("f", 1e-6), "flag": ("b", False), "text": ("s", "x"),
        "integers": ("ints", [1]), "numbers": ("floats", [0.5]), "flags": ("flags", [True]), "texts": ("texts", ["x"]),
    }  # fmt: skip
    for reader, (key, value) in readers.items():
        read = getattr(found, reader)
        assert (list(read(key)) if isinstance(value, list) else read(key)) == value
        assert read("absent") is None
        takes = {key} | {"number": {"i"}, "numbers": {"ints"}}.get(reader, set())
        for other in set(found) - takes:
            with pytest.raises(CorruptFile, match=rf"{NAME}.*: {other} must be an? .*, it is"):
                read(other)


@pytest.mark.parametrize("text", ["0.0", "-0.0", "1e-06", "0.1", "0.70710677", "500000.0", "3.4028235e+38", "inf"])
def test_32_bit_floats_come_as_the_shortest_decimal(text: str) -> None:
    (stored,) = struct.unpack("<f", struct.pack("<f", float(text)))
    assert str(shortest(stored)) == text


def test_not_a_number_stays_so() -> None:
    assert str(shortest(float("nan"))) == "nan"


def test_without_arrays_these_and_long_texts_are_checked_and_left_in_the_file() -> None:
    pairs = [kv("a", ARRAY, array(U8, [1])), kv("long", STRING, "x" * 1_100_000), kv("short", STRING, "y")]
    storage = MemoryStorage({NAME: gguf((), pairs)})
    found = read_header(storage, storage.list()[0], arrays=False).metadata
    assert dict(found) == {"a": None, "long": None, "short": "y"}
    assert found.as_text() == {"short": "y"}
    assert found.texts("absent") is found.text("long") is None


def test_a_vocabulary_of_262144_tokens_is_read_within_a_second_and_100_mb() -> None:
    tokens = array(STRING, [f"token {i}" for i in range(262_144)])
    merges = array(STRING, [f"token {i} token {i + 1}" for i in range(514_906)])
    scores = array(FLOAT, [0.5] * 262_144)
    storage = MemoryStorage(
        {NAME: gguf([T()], [kv("t", ARRAY, tokens), kv("m", ARRAY, merges), kv("s", ARRAY, scores)])}
    )
    (file,) = storage.list()
    with little_time():
        found = read_metadata(storage, file)
    assert (found["t"][262_143], found["m"][514_905]) == ("token 262143", "token 514905 token 514906")
    with little_memory(8 * MIB):
        read_header(storage, file, arrays=False)
    assert len(memoryview(found["m"]._bytes)) < 16 << 20  # it keeps the bytes, not half a million strings
