"""Every rule of the GGUF format: what breaks it is refused by name, its neighbour is read; and what that costs."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    NAME,
    Q4_0,
    STRING,
    U8,
    U32,
    U64,
    T,
    array,
    catalogue,
    gguf,
    kv,
    s,
)
from helpers.measuring import little_memory, little_time, refused
from helpers.memory_storage import MemoryStorage
from helpers.watched_reader import catalogue_watched
from tensorferry.errors import CorruptFile, TensorferryError, UnknownFormat
from tensorferry.formats.gguf import GgufFormat
from tensorferry.formats.gguf_header import read_header
from tensorferry.formats.safetensors import SafetensorsFormat
from tensorferry.storage.local import LocalStorage


@dataclass(frozen=True)
class Rule:
    what: str
    refused: bytes
    says: str
    accepted: bytes = gguf()
    error: type[TensorferryError] = CorruptFile

    def __str__(self) -> str:
        return self.what.replace(" ", "-")


def pair(key: str | bytes, kind: int, value: object) -> bytes:
    return gguf(pairs=[kv(key, kind, value)])


def alignment(value: object, kind: int = U32) -> bytes:
    return pair("general.alignment", kind, value)


HUGE = 2**40
EIGHT = bytes(8)

RULES = [
    Rule("no bytes", b"", "it is empty"),
    Rule("an unfinished start", gguf()[:23], "at least 24 bytes", gguf((), end_padding=False)),
    Rule("version 0", gguf(version=0), "GGUF version 0", error=UnknownFormat),
    Rule("version 1", gguf(version=1), "GGUF version 1: convert", gguf(version=2), UnknownFormat),
    Rule("version 4", gguf(version=4), "version 4: 2 and 3 are known", gguf(version=3), UnknownFormat),
    Rule("big-endian version 2", gguf(version=2, order=">"), "big-endian kind", gguf(order=">"), UnknownFormat),
    Rule("another magic", b"GGUX" + gguf()[4:], "starts with b'GGUX'", error=UnknownFormat),
    Rule("an older ggml file", b"tjgg" + gguf()[4:], "from before GGUF", error=UnknownFormat),
    Rule(
        "a Git-LFS pointer",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4096\n",
        "git lfs pull",
        error=UnknownFormat,
    ),
    Rule("an HTML page", b"<!DOCTYPE html><html><body>Sign in</body></html>", "an HTML page", error=UnknownFormat),
    Rule("more keys than fit", gguf(kv_count=HUGE), "1,099,511,627,776 keys are declared"),
    Rule("more tensors than fit", gguf(tensor_count=HUGE), "1,099,511,627,776 tensors are declared"),
    Rule("too many keys", gguf((), [bytes(1_000_000)], kv_count=70_000), "70,000 keys, the limit is 65,536"),
    Rule("too many tensors", gguf((), [bytes(4_000_000)], kv_count=0, tensor_count=140_000), "there are 140,000"),
    Rule("a duplicate key", gguf(pairs=[kv("a", U8, 1)] * 2), "duplicate key 'a'", pair("a", U8, 1)),
    Rule("an empty key", pair("", U8, 1), "name is empty", pair("a", U8, 1)),
    Rule("a key that is not UTF-8", pair(b"\xff", U8, 1), "is not UTF-8", pair("é", U8, 1)),
    Rule("a key of 65,536 bytes", pair("k" * 65_536, U8, 1), "the limit is 65,535", pair("k" * 65_535, U8, 1)),
    Rule("a key past the end", gguf((), [struct.pack("<Q", HUGE) + bytes(9)], kv_count=1), "truncated"),
    Rule("value type 13", gguf(pairs=[s("a") + struct.pack("<I", 13) + EIGHT]), "a: value type 13"),
    Rule("a string past the end", pair("a", STRING, struct.pack("<Q", HUGE)), "a: truncated: its value takes"),
    Rule("an array past the end", pair("a", ARRAY, array(U8, [], count=HUGE)), "array of 1,099,511,627,776 U8"),
    Rule("an array whose size wraps", pair("a", ARRAY, array(U64, [1], count=2**61 + 1)), "truncated: an array of"),
    Rule("strings past the end", pair("a", ARRAY, array(STRING, [], count=HUGE)), "a: truncated: an array of"),
    Rule("a string of an array past the end", pair("a", ARRAY, array(STRING, [b""], count=2)), "truncated"),
    Rule("elements of type 13", pair("a", ARRAY, struct.pack("<IQ", 13, 0)), "a: value type 13"),
    Rule(
        "three levels of arrays",
        pair("a", ARRAY, array(ARRAY, [array(ARRAY, [array(U8, [1])])])),
        "nest over 2 deep",
        pair("a", ARRAY, array(ARRAY, [array(U8, [1])])),
    ),
    Rule("a boolean of 2", pair("a", BOOL, 2), "must be 0 or 1, it is 2", pair("a", BOOL, 1)),
    Rule("a boolean of 2 in an array", pair("a", ARRAY, array(BOOL, [0, 1, 2])), "must be 0 or 1, it is 2"),
    Rule(
        "alignment 0", alignment(0), "general.alignment is 0", gguf(pairs=[kv("general.alignment", U32, 64)], align=64)
    ),
    Rule("alignment 3", alignment(3), "general.alignment is 3"),
    Rule("alignment 24", alignment(24), "general.alignment is 24", alignment(8)),
    Rule("alignment 2^31", alignment(2**31), "general.alignment is 2147483648"),
    Rule("alignment of another type", alignment(32, I32), "general.alignment must be U32, it is I32"),
    Rule("alignment that is text", alignment("32", STRING), "general.alignment must be U32, it is STRING"),
    Rule("a duplicate tensor", gguf([T(), T(offset=32)]), "'t': a tensor of this name is there twice"),
    Rule("a name that is not UTF-8", gguf([T(b"\xff")]), "is not UTF-8", gguf([T("é")])),
    Rule("a name past the end", gguf([T("n" * 70_000)]), "limit is 65,535", gguf([T("n" * 64)])),
    Rule("five dimensions", gguf([T(ne=(2, 1, 1, 1, 1))]), "5 dimensions", gguf([T(ne=(2, 1, 1, 1))])),
    Rule("2^31 dimensions", gguf([T(rank=2**31)]), "2147483648 dimensions"),
    Rule("elements that wrap", gguf([T(ne=(2**32, 2**32))]), "overflow 64 bits"),
    Rule("a negative dimension", gguf([T(ne=(2**64 - 2,))]), "overflow 64 bits"),
    Rule("sizes of an empty tensor that wrap", gguf([T(ne=(0, 2**32, 2**32))]), "overflow 64 bits"),
    Rule("a size that wraps", gguf([T(ne=(2**62,))]), "truncated: its tensors end at byte"),
    Rule("padding that wraps", gguf([T(offset=2**64 - 32)]), "truncated: its tensors end at byte"),
    Rule(
        "half a block",
        gguf([T(ne=(16,), type=Q4_0)]),
        "whole blocks of 32 Q4_0",
        gguf([T("t", (32,), Q4_0, bytes(18))]),
    ),
    Rule("rows of half a block", gguf([T(ne=(16, 2), type=Q4_0)]), "shape [2, 16] are not whole blocks"),
    Rule("a scalar of a block type", gguf([T(ne=(), type=Q4_0)]), "are not whole blocks"),
    Rule("an offset that is not aligned", gguf([T(), T("u", offset=8)]), "'u' is at offset 8", gguf([T(), T("u")])),
    Rule("an overlap", gguf([T(ne=(16,), data=bytes(64)), T("u", offset=32)]), "overlap: 'u' begins"),
    Rule("the same bytes twice", gguf([T(), T("u", offset=0)]), "overlap"),
    Rule("data that ends early", gguf([T()], end_padding=False)[:-3], "3 are missing; first tensor hit: 't'"),
    Rule("no data at all", gguf([T(data=b"")]), "are missing"),
    Rule("an empty tensor far away", gguf([T(), T("z", (0,), data=b"", offset=320)]), "first tensor hit: 'z'"),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_breaks_a_rule_is_refused_by_name(rule: Rule, tmp_path: Path) -> None:
    with pytest.raises(rule.error) as refusal:
        catalogue(tmp_path, rule.refused)
    assert NAME in str(refusal.value)
    assert rule.says in str(refusal.value)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_its_neighbour_is_read(rule: Rule, tmp_path: Path) -> None:
    assert len(catalogue(tmp_path, rule.accepted)) <= 2


LEGAL = {
    "a zero dimension": gguf([T("t", (0, 4), data=b"")]),
    "a zero dimension, and no padding": gguf([T("t", (0, 4), data=b"")], end_padding=False),
    "an empty tensor after data without padding": gguf([T(), T("z", (0,), data=b"")], end_padding=False)[:-24],
    "a scalar": gguf([T(ne=(), data=bytes(4))]),
    "no tensors": gguf(()),
    "trailing bytes": gguf() + b"more",
    "no padding at the end": gguf(end_padding=False),
    "a name of 64 bytes": gguf([T("n" * 64)]),
    "no name": gguf([T("")]),
    "version 2": gguf(version=2),
    "bytes that are not UTF-8 in a value": pair("a", STRING, s(b"\xff\xfe")),
    "bytes that are not UTF-8 in an array": pair("a", ARRAY, array(STRING, [b"\xff\xfe"])),
    "scores of another type": pair("tokenizer.ggml.scores", ARRAY, array(U8, [1])),
    "holes": gguf([T(), T("u", offset=64, data=bytes(40))]),
    "another order": gguf([T(offset=32), T("u", offset=0, data=bytes(40))]),
    "a type that is not known": gguf([T(type=200)]),
    "a type that was removed": gguf([T(type=4)]),
}


@pytest.mark.parametrize("what", LEGAL)
def test_what_is_odd_and_legal_is_read(what: str, tmp_path: Path) -> None:
    catalogue(tmp_path, LEGAL[what])


def test_a_gguf_file_under_another_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(gguf())
    with LocalStorage(tmp_path) as storage, pytest.raises(CorruptFile, match="a GGUF file"):
        SafetensorsFormat().catalogue(storage, storage.list()[0])


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile) as refusal:
        catalogue(tmp_path, gguf([T("\x1b[2J\u202e" + "x" * 500, offset=8)]))
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 500


# -- what it costs

BIG = 99_000_000


def big(
    start: bytes, unit: bytes, *, keys: int = 1, tensors: int = 0, most: int = 40_000_000
) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as out:
            out.write(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + start + unit * (most // max(1, len(unit))))
            out.truncate(BIG)  # the rest is a hole of the file system

    return write


def an_array(element: int, count: int) -> bytes:
    return s("a") + struct.pack("<IIQ", ARRAY, element, count)


BOMBS = {
    "a key": big(struct.pack("<Q", BIG), b"a"),
    "a string without an end": big(s("a") + struct.pack("<IQ", STRING, 2 * BIG), b"a"),
    "a string that ends past the limit": big(s("a") + struct.pack("<IQ", STRING, BIG - 60), b"a", keys=2),
    "empty strings": big(an_array(STRING, 4_000_000), bytes(8), keys=2),
    "too many empty strings": big(an_array(STRING, 5_000_000), bytes(8)),
    "long strings": big(an_array(STRING, 90), s(b"a" * 1_000_000), keys=2),
    "arrays in an array": big(an_array(ARRAY, 8_000_000), struct.pack("<IQ", U8, 0)),
    "many arrays in an array": big(an_array(ARRAY, 60_000), struct.pack("<IQ", U8, 0), keys=2),
    "booleans": big(an_array(BOOL, BIG - 60), b"\1", keys=2),
    "numbers": big(an_array(U64, BIG // 8 - 60), b"\1", keys=2),
    "strings of keys": big(
        b"", b"".join(s(f"{i:05}") + struct.pack("<I", STRING) + s(b"a" * 6000) for i in range(6_000)), keys=6_001
    ),
    "keys": big(b"", b"".join(s(f"{i:05}") + struct.pack("<IB", U8, 1) for i in range(30_000)), keys=30_001),
    "tensors": big(
        b"",
        b"".join(s(f"{i:06}") + struct.pack("<I1QIQ", 1, 0, F32, 0) for i in range(30_000)),
        keys=0,
        tensors=30_001,
    ),
}


SLOW_TO_TRACE = ("empty strings", "many arrays in an array")


@pytest.mark.parametrize("bomb", BOMBS)
def test_refusing_a_bomb_takes_little_time_of_the_processor(bomb: str, tmp_path: Path) -> None:
    BOMBS[bomb](tmp_path / NAME)
    with little_time(1.5):
        refused(GgufFormat(), tmp_path / NAME)


@pytest.mark.parametrize("bomb", [bomb for bomb in BOMBS if bomb not in SLOW_TO_TRACE])
def test_refusing_a_bomb_takes_little_memory(bomb: str, tmp_path: Path) -> None:
    BOMBS[bomb](tmp_path / NAME)
    with little_memory():
        refused(GgufFormat(), tmp_path / NAME)


def test_a_header_over_the_limit_is_refused(tmp_path: Path) -> None:
    big(an_array(U8, 99_999_000), b"", most=1)(tmp_path / NAME)
    with (tmp_path / NAME).open("r+b") as out:
        out.truncate(200_000_000)
    with LocalStorage(tmp_path) as storage:
        assert len(GgufFormat().catalogue(storage, storage.stat(NAME))) == 0
    big(an_array(U8, 100_000_000), b"", most=1)(tmp_path / NAME)
    with (tmp_path / NAME).open("r+b") as out:
        out.truncate(200_000_000)
    with LocalStorage(tmp_path) as storage, pytest.raises(CorruptFile, match="take the header over 100,000,000 bytes"):
        GgufFormat().catalogue(storage, storage.stat(NAME))


# -- damage

SEED = gguf(
    [T("a", (32, 2), Q4_0, bytes(36)), T("b", (2, 3), F32, bytes(24)), T("c", (), F32, bytes(4)), T("d", (2,), 200)],
    [
        kv("general.architecture", STRING, "llama"),
        kv("general.alignment", U32, 32),
        kv("t.tokens", ARRAY, array(STRING, ["a", "bc", ""])),
        kv("t.flags", ARRAY, array(BOOL, [0, 1])),
        kv("t.nested", ARRAY, array(ARRAY, [array(U8, [1, 2]), array(STRING, ["x"])])),
        kv("t.deep", BOOL, 1),
    ],
)
EDGES = st.sampled_from([0, 1, 8, 31, 32, 33, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1])


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    content = bytearray(SEED)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, len(SEED) - 9))
        if data.draw(st.booleans()):
            content[at] = data.draw(st.integers(0, 255))
        else:
            content[at : at + 8] = struct.pack("<Q", data.draw(EDGES))
    storage = MemoryStorage({NAME: bytes(content[: data.draw(st.integers(4, len(content)))])})
    (file,) = storage.list()
    try:
        found = GgufFormat().catalogue(storage, file)
        header = read_header(storage, file)
    except TensorferryError:
        return
    assert {t.name for t in header.tensors} == set(found)
    spans = sorted(e.span for e in found.values() if e.span is not None and e.span.length)
    assert all(one.offset + one.length <= other.offset for one, other in pairwise(spans))
    assert all(header.data_start <= span.offset and span.offset + span.length <= file.size for span in spans)


def test_nothing_is_executed_and_nothing_outside_is_opened(tmp_path: Path) -> None:
    for at, rule in enumerate(RULES):
        (tmp_path / f"{at:03}.gguf").write_bytes(rule.refused)
    template = kv("tokenizer.chat_template", STRING, "{{ cycler.__init__.__globals__.os.popen('true').read() }}")
    (tmp_path / "good.gguf").write_bytes(gguf(pairs=[template]))
    assert catalogue_watched(tmp_path, "gguf") == (len(RULES), 1, [], [], [])
