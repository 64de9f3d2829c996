"""Every rule of the safetensors format: a file that breaks it is refused by name, its neighbour is read."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.safetensors_bytes import (
    EMPTY,
    GOOD,
    NAME,
    attempt,
    catalogue,
    entry,
    one,
    st_file,
    two,
    with_extra,
    with_metadata,
)
from helpers.watched_reader import catalogue_watched
from tensorferry.errors import CorruptFile, TensorferryError, UnsafeFile, UnsupportedDtype
from tensorferry.formats.safetensors import SAFETENSORS_DTYPES, SafetensorsFormat
from tensorferry.storage.base import File
from tensorferry.storage.local import LocalStorage


@dataclass(frozen=True)
class Rule:
    number: int
    what: str
    refused: bytes
    says: str
    accepted: bytes = GOOD
    error: type[TensorferryError] = CorruptFile

    def __str__(self) -> str:
        return f"{self.number:02}-{self.what.replace(' ', '-')}"


RULES = [
    Rule(1, "no bytes", b"", "it is empty", st_file("{}")),
    Rule(1, "seven bytes", b"\2\0\0\0\0\0\0", "at least 8 bytes, this one 7", st_file("{}")),
    Rule(2, "a big-endian length", struct.pack(">Q", 2) + b"{}", "header of 144115188075855872 bytes", st_file("{}")),
    Rule(3, "a length over the limit", st_file("{}", length=100_000_001), "limit of the format is 100000000"),
    Rule(3, "a length that wraps when 8 is added", st_file("{}", length=2**64 - 8), "header of 18446744073709551608"),
    Rule(4, "a length one past the end", st_file("{}", length=3), "truncated: header declares 3 bytes", st_file("{}")),
    Rule(5, "no header", st_file(""), "its header is empty", st_file("{}")),
    Rule(5, "a space first", st_file(" " + GOOD[8:-1].decode(), b"\1"), "must start with '{'"),
    Rule(5, "an array", st_file("[]"), "must start with '{'", st_file("{}")),
    Rule(6, "not UTF-8", st_file(b'{"\xff":' + EMPTY.encode() + b"}"), "not UTF-8", st_file('{"ÿ":' + EMPTY + "}")),
    Rule(6, "overlong UTF-8", st_file(b'{"\xc0\xaf":' + EMPTY.encode() + b"}"), "not UTF-8"),
    Rule(6, "UTF-8 cut at the end", st_file(b"{}\xf0\x9f"), "not UTF-8", st_file("{}")),
    Rule(6, "a byte order mark", st_file(b"\xef\xbb\xbf{}"), "must start with '{'", st_file("{}")),
    Rule(6, "UTF-16", st_file("{}".encode("utf-16-le")), "double quotes is expected", st_file("{}")),
    Rule(7, "two objects", st_file("{}{}"), "nothing but spaces may follow", st_file("{} ")),
    Rule(7, "NUL padding", st_file("{}\0\0"), "nothing but spaces may follow", st_file("{}\n\t\r ")),
    Rule(7, "a vertical tab after it", st_file("{}\v"), "nothing but spaces may follow", st_file("{}\t")),
    Rule(7, "an object that does not end", st_file('{"t":' + EMPTY), "ends early", st_file('{"t":' + EMPTY + "}")),
    Rule(8, "NaN", with_extra("NaN"), "NaN is not JSON", with_extra("null")),
    Rule(8, "Infinity", with_extra("-Infinity"), "-Infinity is not JSON", with_extra("-1")),
    Rule(8, "infinity by overflow", with_extra("1e999"), "too large", with_extra("1e99")),
    Rule(8, "a comment", with_extra("1/**/"), "not valid JSON", with_extra("1")),
    Rule(8, "a trailing comma in an array", with_extra("[1,]"), "not valid JSON", with_extra("[1]")),
    Rule(8, "a trailing comma at the end", st_file('{"t":' + EMPTY + ",}"), "double quotes is expected"),
    Rule(8, "a comma first", st_file('{,"t":' + EMPTY + "}"), "double quotes is expected"),
    Rule(8, "no comma", st_file('{"t":' + EMPTY + ' "u":' + EMPTY + "}"), "',' or '}' is expected"),
    Rule(8, "single quotes", st_file("{'t':" + EMPTY + "}"), "double quotes is expected"),
    Rule(8, "no colon", st_file('{"t" ' + EMPTY + "}"), "':' is expected", st_file('{"t" : ' + EMPTY + "}")),
    Rule(
        8,
        "a raw tab in a name",
        st_file('{"a\tb":' + EMPTY + "}"),
        "control character",
        st_file('{"a\\tb":' + EMPTY + "}"),
    ),
    Rule(
        8,
        "a lone surrogate in a name",
        st_file('{"\\ud83d":' + EMPTY + "}"),
        "lone surrogate",
        st_file('{"\\ud83d\\ude00":' + EMPTY + "}"),
    ),
    Rule(
        8,
        "a lone surrogate in the metadata",
        with_metadata('{"a":"\\udc00"}'),
        "lone surrogate",
        with_metadata('{"a":"\\u00e9"}'),
    ),
    Rule(8, "a lone surrogate deep inside", with_extra('[{"a":["\\udead"]}]'), "lone surrogate"),
    Rule(8, "a number of 5000 digits", one(shape="[" + "1" * 5000 + "]"), "thousands of digits"),
    Rule(8, "a leading zero", one(shape="[01]"), "not valid JSON"),
    Rule(8, "a plus sign", one(shape="[+1]"), "not valid JSON"),
    Rule(
        9, "128 levels", with_extra("[" * 126 + "]" * 126), "nested deeper than 127", with_extra("[" * 125 + "]" * 125)
    ),
    Rule(
        9,
        "128 levels of objects",
        with_extra('{"a":' * 126 + "1" + "}" * 126),
        "nested deeper than 127",
        with_extra('{"a":' * 125 + "1" + "}" * 125),
    ),
    Rule(9, "10000 levels", with_extra("[" * 10000), "nested deeper than 127"),
    Rule(10, "one name twice", two(EMPTY, EMPTY, 0).replace(b'"b"', b'"a"'), "duplicate key 'a'", two(EMPTY, EMPTY, 0)),
    Rule(
        10,
        "one name twice when unescaped",
        st_file('{"a":' + EMPTY + ',"\\u0061":' + EMPTY + "}"),
        "duplicate key 'a'",
        st_file('{"a":' + EMPTY + ',"\\u0062":' + EMPTY + "}"),
    ),
    Rule(10, "two shapes", with_extra('1,"shape":[1]'), "duplicate key 'shape'", with_extra('1,"y":[1]')),
    Rule(
        10,
        "one key twice further inside",
        with_extra('[{"y":1,"y":1}]'),
        "duplicate key 'y'",
        with_extra('[{"y":1},{"y":1}]'),
    ),
    Rule(
        10,
        "one metadata key twice",
        with_metadata('{"a":"1","\\u0061":"2"}'),
        "duplicate key 'a' in __metadata__",
        with_metadata('{"a":"1","A":"2"}'),
    ),
    Rule(
        10,
        "metadata twice",
        st_file('{"__metadata__":{},"__metadata__":{}}'),
        "duplicate key '__metadata__'",
        st_file('{"__metadata__":{}}'),
    ),
    Rule(11, "a number in the metadata", with_metadata('{"a":1}'), "'a' is a number", with_metadata('{"a":"1"}')),
    Rule(11, "null in the metadata", with_metadata('{"a":null}'), "'a' is null", with_metadata('{"a":""}')),
    Rule(11, "an object in the metadata", with_metadata('{"a":{"b":"c"}}'), "'a' is an object", with_metadata("{}")),
    Rule(11, "metadata that is null", with_metadata("null"), "a JSON object is expected", with_metadata("{}")),
    Rule(11, "metadata that is an array", with_metadata("[]"), "a JSON object is expected", with_metadata(" { } ")),
    Rule(12, "an entry that is an array", st_file('{"t":["U8",[1],[0,1]]}', b"\1"), "'t' must be an object", GOOD),
    Rule(12, "an entry that is text of three pairs", st_file('{"t":["ab","cd","ef"]}'), "'t' must be an object"),
    Rule(12, "an entry that is null", st_file('{"t":null}'), "it is null"),
    Rule(
        12,
        "no dtype",
        st_file('{"t":{"shape":[0],"data_offsets":[0,0]}}'),
        "'t' has no dtype",
        st_file('{"t":' + EMPTY + "}"),
    ),
    Rule(12, "no shape", st_file('{"t":{"dtype":"U8","data_offsets":[0,0]}}'), "'t' has no shape"),
    Rule(12, "no data_offsets", st_file('{"t":{"dtype":"U8","shape":[0]}}'), "'t' has no data_offsets"),
    Rule(12, "three other keys", st_file('{"t":{"a":1,"b":2,"c":3}}'), "no dtype and no shape and no data_offsets"),
    Rule(
        13,
        "a type of torch only",
        one("C128", size=16),
        "'C128'",
        one("C64", offsets="[0,8]", size=8),
        UnsupportedDtype,
    ),
    Rule(13, "lower case", one("f32"), "'f32'", one("F32", offsets="[0,4]", size=4), UnsupportedDtype),
    Rule(13, "a type that is a number", one().replace(b'"U8"', b"1234"), "dtype must be a string, it is a number"),
    Rule(13, "a type that is an array", one().replace(b'"U8"', b"[11]"), "dtype must be a string, it is an array"),
    Rule(14, "a dim of 1.0", one(shape="[1.0]"), "shape must be a list of integers", GOOD),
    Rule(14, "a dim of 1e0", one(shape="[1e0]"), "shape must be a list of integers"),
    Rule(14, "a dim that is true", one(shape="[true]"), "it is [true]"),
    Rule(14, "a dim that is text", one(shape='["1"]'), 'it is ["1"]'),
    Rule(
        14,
        "a dim of -0",
        one(shape="[-0]", offsets="[0,0]", size=0),
        "it is [-0]",
        one(shape="[0]", offsets="[0,0]", size=0),
    ),
    Rule(14, "a negative dim", one(shape="[-1,-1]"), "it is [-1, -1]", one(shape="[1,1]")),
    Rule(14, "a shape that is a number", one(shape="1"), "shape must be a list", one(shape="[]")),
    Rule(14, "offsets of -0", one(offsets="[-0,1]"), "they are [-0, 1]"),
    Rule(14, "offsets that are not whole", one(offsets="[0,1.0]"), "they are [0, 1.0]"),
    Rule(14, "offsets that are booleans", one(offsets="[false,true]"), "they are [false, true]"),
    Rule(14, "three offsets", one(offsets="[0,1,1]"), "two integers"),
    Rule(14, "offsets as text", one(offsets='"01"'), 'they are "01"'),
    Rule(15, "2^64 elements", one(shape="[4294967296,4294967296]"), "overflows 64 bits"),
    Rule(15, "a dim of 2^63", one(shape="[9223372036854775808]"), "2^63 - 1"),
    Rule(15, "2^61 elements of 8 bytes", one("F64", "[2305843009213693952]"), "overflows 64 bits"),
    Rule(
        15,
        "strides of an empty tensor",
        one(shape="[0,4294967296,4294967296]", offsets="[0,0]", size=0),
        "overflows 64 bits",
        one(shape="[0,4294967296,1048576]", offsets="[0,0]", size=0),
    ),
    Rule(
        15,
        "65 dimensions",
        one(shape="[" + "1," * 64 + "1]"),
        "65 dimensions, the limit is 64",
        one(shape="[" + "1," * 63 + "1]"),
    ),
    Rule(16, "half a byte", one("F4", "[1]"), "even last dimension", one("F4", "[2]")),
    Rule(16, "rows of F4 that share a byte", one("F4", "[2,1]"), "even last dimension", one("F4", "[1,2]")),
    Rule(16, "a scalar of F4", one("F4", "[]"), "even last dimension"),
    Rule(16, "12 bits", one("F6_E2M3", "[2]"), "a multiple of 4 elements", one("F6_E2M3", "[4]", "[0,3]", 3)),
    Rule(17, "an end before its begin", one(offsets="[1,0]"), "begin <= end"),
    Rule(18, "too few bytes", one("F32", "[2]", "[0,4]", 4), "takes 8 bytes", one("F32", "[2]", "[0,8]", 8)),
    Rule(18, "too many bytes", one("F32", "[]", "[0,8]", 8), "takes 4 bytes", one("F32", "[]", "[0,4]", 4)),
    Rule(18, "an empty tensor with bytes", one(shape="[0]"), "takes 0 bytes"),
    Rule(
        19,
        "a hole between",
        two(entry(), entry(offsets="[2,3]"), 3),
        "hole: bytes 1 to 2",
        two(entry(), entry(offsets="[1,2]"), 2),
    ),
    Rule(19, "a hole before", one(offsets="[1,2]", size=2), "hole: bytes 0 to 1"),
    Rule(
        19,
        "an overlap",
        two(entry(shape="[2]", offsets="[0,2]"), entry(shape="[2]", offsets="[1,3]"), 3),
        "overlap: 'b'",
        two(entry(shape="[2]", offsets="[2,4]"), entry(shape="[2]", offsets="[0,2]"), 4),
    ),
    Rule(19, "the same bytes twice", two(entry(), entry(), 1), "overlap: 'b'"),
    Rule(
        19,
        "an empty tensor inside another",
        two(entry(shape="[2]", offsets="[0,2]"), entry(shape="[0]", offsets="[1,1]"), 2),
        "overlap: 'b'",
        two(entry(shape="[2]", offsets="[0,2]"), entry(shape="[0]", offsets="[2,2]"), 2),
    ),
    Rule(
        19,
        "an empty tensor far away",
        two(entry(), entry(shape="[0]", offsets="[9,9]"), 1),
        "hole: bytes 1 to 9",
        two(entry(), entry(shape="[0]", offsets="[0,0]"), 1),
    ),
    Rule(20, "a byte missing", GOOD[:-1], "1 are missing"),
    Rule(20, "a byte too many", GOOD + b"\0", "1 bytes at its end belong to no tensor"),
    Rule(20, "data without tensors", st_file("{}", b"\0"), "belong to no tensor", st_file("{}")),
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


def test_every_rule_has_a_refused_file() -> None:
    assert {rule.number for rule in RULES} == set(range(1, 21))


@pytest.mark.parametrize("name", [name for name in SAFETENSORS_DTYPES if name not in ("F4", "F6_E2M3", "F6_E3M2")])
def test_every_type_of_whole_bytes_is_read_and_holds_its_size_to_account(name: str, tmp_path: Path) -> None:
    nbytes = SAFETENSORS_DTYPES[name].block_bytes
    assert catalogue(tmp_path, one(name, "[3]", f"[0,{3 * nbytes}]", 3 * nbytes))["t"].nbytes == 3 * nbytes
    with pytest.raises(CorruptFile, match="takes"):
        catalogue(tmp_path, one(name, "[3]", f"[0,{3 * nbytes + 1}]", 3 * nbytes + 1))


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4096\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "an HTML page"),
        (b"PK\x03\x04\x14\0\0\0\0\0\0\0\0\0", "a zip archive"),
        (b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0", "a GGUF file"),
        (b"\x80\x02}q\0X\x01\0\0\0aq\x01K\x01s.", "pickle"),
        (b"\x80\x04\x95\x1f\0\0\0\0\0\0\0}\x94.", "pickle"),
        (b'{"error":"Repository not found"}', "JSON text"),
        (b"\0" * 4096, "zeros"),
    ],
)
def test_another_sort_of_file_under_this_name_is_told(head: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=says) as refusal:
        catalogue(tmp_path, head)
    assert NAME in str(refusal.value)


def test_a_pipe_under_this_name_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with LocalStorage(tmp_path) as storage, pytest.raises(UnsafeFile, match="pipe"):
        SafetensorsFormat().catalogue(storage, storage.list()[0])


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets", "x"])
@pytest.mark.parametrize("depth", [100, 200, 500, 900, 5000])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_nesting_that_python_can_read_and_we_cannot_say_is_refused_by_name(
    field: str, depth: int, begin: str, end: str, tmp_path: Path
) -> None:
    fields = {"dtype": '"U8"', "shape": "[1]", "data_offsets": "[0,1]"} | {field: begin * depth + "1" + end * depth}
    text = ",".join(f'"{key}":{value}' for key, value in fields.items())
    found = attempt(tmp_path, st_file(f'{{"t":{{{text}}}}}', b"\1"))
    if field == "x" and depth == 100:
        assert not isinstance(found, TensorferryError)
    else:
        assert isinstance(found, CorruptFile)
        assert NAME in str(found)
        assert len(str(found)) < 600


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile) as refusal:
        catalogue(tmp_path, st_file('{"\\u001b[2J\\u202e' + "x" * 500 + '":{"dtype":"U8"}}'))
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 500


def test_a_link_that_leads_out_is_refused_and_its_target_never_opened(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / NAME).write_bytes(GOOD)
    (tmp_path / "inside" / NAME).symlink_to(f"../{NAME}")
    with LocalStorage(tmp_path / "inside") as storage:
        file = File(NAME, len(GOOD), ())
        with pytest.raises(UnsafeFile, match="leads out of its folder"):
            SafetensorsFormat().catalogue(storage, file)


# Nothing is executed, nothing outside is opened: an audit hook watches a process that catalogues every file above.


def test_nothing_is_executed_and_nothing_outside_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for at, rule in enumerate(RULES):
        (folder / f"{at:03}.safetensors").write_bytes(rule.refused)
    (folder / "good.safetensors").write_bytes(GOOD)
    (tmp_path / "outside.safetensors").write_bytes(GOOD)
    (folder / "link.safetensors").symlink_to("../outside.safetensors")
    (folder / "device.safetensors").symlink_to("/dev/zero")
    assert catalogue_watched(folder, "safetensors") == (len(RULES) + 2, 1, [], [], [])
