"""What is JSON to a reader that believes nothing, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorferry.errors import CorruptFile
from tensorferry.formats.strict_json import JsonStream, json_text, parse_json_object, refuse_ambiguous

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES, max_size=5)


def streamed(data: bytes, *, cut: int = 1 << 20, limit: int = 1 << 20) -> list[tuple[str, Any]]:
    pieces = (data[at : at + cut] for at in range(0, len(data), cut))
    stream = JsonStream(pieces, what="file")
    members = list(stream.members(limit=limit))
    stream.end()
    return members


def plain(value: Any) -> Any:
    """Return a streamed value as `json.loads` would give it."""
    if isinstance(value, tuple):
        return {key: plain(item) for key, item in value}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


@given(value=OBJECTS, spaced=st.booleans(), ascii_only=st.booleans())
def test_what_the_standard_library_writes_is_read_as_it_was(
    value: dict[str, Any], spaced: bool, ascii_only: bool
) -> None:
    data = json.dumps(value, indent=1 if spaced else None, ensure_ascii=ascii_only).encode()
    assert parse_json_object(data, what="file") == value


@given(value=OBJECTS, spaced=st.booleans(), ascii_only=st.booleans(), cut=st.integers(1, 9))
def test_pieces_give_the_same_wherever_they_are_cut(
    value: dict[str, Any], spaced: bool, ascii_only: bool, cut: int
) -> None:
    data = json.dumps(value, indent=1 if spaced else None, ensure_ascii=ascii_only).encode()
    assert {key: plain(item) for key, item in streamed(data, cut=cut)} == value


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not valid JSON"),
        (b"[]", "object is expected, found an array"),
        (b"null", "object is expected, found null"),
        (b'"a"', "object is expected, found a string"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"a":1}'.encode("utf-16"), "byte order mark"),
        (b'{"a":"\xff"}', "not UTF-8 at byte 6"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":[-Infinity]}', "-Infinity is not JSON"),
        (b'{"a":1e999}', "1e999 is too large"),
        (b'{"a":1,"b":2,"\\u0061":3}', "duplicate key 'a'"),
        (b'{"x":[{"a":1,"a":2}]}', "duplicate key 'a'"),
        (b'{"a":"\\ud800"}', "lone surrogate"),
        (b'{"\\udfff":1}', "lone surrogate"),
        (b'{"a":"\t"}', "control character"),
        (b'{"a":1,}', "not valid JSON"),
        (b"{} {}", "Extra data, at character 3"),
        (b"{'a':1}", "double quotes"),
        (b'{"a":' + b"[" * 127 + b"]" * 127 + b"}", "deeper than 127"),
        (b'{"a":' + b"[" * 100_000, "deeper than 127"),
        (b'{"a":' + b"9" * 5000 + b"}", "thousands of digits"),
    ],
)
def test_what_is_not_strict_is_refused_with_its_reason(data: bytes, says: str) -> None:
    with pytest.raises(CorruptFile, match=says) as refusal:
        parse_json_object(data, what="index.json")
    assert str(refusal.value).startswith("index.json: ")


def test_the_depth_is_counted_in_open_containers() -> None:
    assert parse_json_object(b'{"a":' + b"[" * 126 + b"]" * 126 + b"}", what="file")
    assert parse_json_object(b'{"a":"' + b"[" * 500 + b'"}', what="file")
    assert parse_json_object(b'{"a":[' + b"[]," * 500 + b"[]]}", what="file", max_depth=3)
    with pytest.raises(CorruptFile, match="deeper than 2"):
        parse_json_object(b'{"a":[[]]}', what="file", max_depth=2)


def test_many_keys_with_one_twice_are_told_quickly() -> None:
    keys = ",".join(f'"{n}":0' for n in range(100_000))
    with pytest.raises(CorruptFile, match="duplicate key '99999'"):
        parse_json_object(f'{{{keys},"99999":1}}'.encode(), what="file")


class TestStream:
    def test_objects_inside_keep_their_pairs(self) -> None:
        assert streamed(b'{"a":{"x":1,"x":[2]}}') == [("a", (("x", 1), ("x", [2])))]

    def test_minus_zero_is_no_integer(self) -> None:
        ((_, value),) = streamed(b'{"a":[-0,0]}')
        assert [type(item) for item in value] == [float, int]

    def test_a_member_over_the_limit_is_refused_wherever_the_text_is_cut(self) -> None:
        data = b'{"a":"' + b"x" * 14 + b'"}'  # the member takes 20 characters
        for cut in range(1, 30):
            assert streamed(data, cut=cut, limit=20)
            with pytest.raises(CorruptFile, match="over 19 characters"):
                streamed(data, cut=cut, limit=19)

    def test_spaces_between_members_do_not_count(self) -> None:
        assert len(streamed(b'{ "a":1' + b" " * 99 + b',"b":2' + b" " * 99 + b"}" + b" " * 99, cut=7, limit=10)) == 2

    def test_a_value_can_be_read_member_by_member(self) -> None:
        stream = JsonStream([b'{"a":1,"in', b'ner": {"b":', b'2},"c":3}'], what="file")
        found: list[tuple[str, Any]] = []
        for key, value in stream.members(limit=99, descend="inner"):
            found.append((key, value))
            if key == "inner":
                found.extend(stream.members(limit=99))
        assert found == [("a", 1), ("inner", None), ("b", 2), ("c", 3)]

    def test_a_fault_is_placed_in_the_whole_text(self) -> None:
        with pytest.raises(CorruptFile, match="at character 14"):
            streamed(b'{"a":1, "b" : !}', cut=3)

    @pytest.mark.parametrize("cut", [1, 2, 100])
    @pytest.mark.parametrize("length", range(22))
    def test_text_that_ends_early_is_refused(self, length: int, cut: int) -> None:
        with pytest.raises(CorruptFile, match="file: "):
            streamed('{"é":[1,{"a":12.5}]}'.encode()[:length] if length < 21 else b"", cut=cut)


def test_objects_as_pairs_are_checked_too() -> None:
    with pytest.raises(CorruptFile, match="duplicate key 'x'"):
        refuse_ambiguous([(("x", 1), ("x", 2))], what="file")
    refuse_ambiguous([(("x", 1), ("y", (("x", "é"),)))], what="file")


def test_values_are_shown_much_as_they_stand_in_the_file() -> None:
    assert json_text([1.0, -0.0, "é", (("a", [None, False]),)]) == '[1.0, -0, "\\u00e9", {"a": [null, false]}]'
