"""Element types: sizes by the formats' own tables, casts judged against what torch really does."""

from __future__ import annotations

import pytest

from tensorferry.core.dtypes import DTYPES, Cast, DType, Kind, cast_kind, dtype_from_json, dtype_to_json


@pytest.mark.parametrize(
    ("name", "shape", "nbytes"),
    [
        ("BOOL", (3,), 3),
        ("BF16", (2, 3), 12),
        ("F4", (2, 4), 4),
        ("F6_E2M3", (4, 4), 12),
        ("C64", (2,), 16),
        ("F32", (), 4),
    ],
)
def test_bytes_of_a_shape(name: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert DTYPES[name].nbytes(shape) == nbytes


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("F32", "F32", Cast.SAME),
        ("F16", "F32", Cast.EXACT),
        ("BF16", "F32", Cast.EXACT),
        ("F8_E4M3", "F16", Cast.EXACT),
        ("F32", "BF16", Cast.ROUNDS),
        ("F16", "BF16", Cast.ROUNDS),
        ("BF16", "F16", Cast.NARROWS),
        ("F64", "F32", Cast.NARROWS),
        ("F32", "F8_E4M3", Cast.NARROWS),
        ("I8", "I64", Cast.EXACT),
        ("U8", "I16", Cast.EXACT),
        ("I64", "I32", Cast.NARROWS),
        ("I8", "U64", Cast.NARROWS),
        ("I32", "F32", Cast.CHANGES_KIND),
        ("F16", "I32", Cast.CHANGES_KIND),
        ("BOOL", "U8", Cast.CHANGES_KIND),
        ("C64", "F32", Cast.CHANGES_KIND),
        ("C64", "C128", Cast.EXACT),
    ],
)
def test_what_a_cast_can_do_to_a_value(source: str, target: str, kind: Cast) -> None:
    assert cast_kind(DTYPES[source], DTYPES[target]) is kind


def test_a_plain_type_is_its_name_in_json_and_any_other_is_written_out() -> None:
    block = DType("W4_G64", Kind.PACKED, 34, 64)
    assert dtype_to_json(DTYPES["BF16"]) == "BF16"
    assert dtype_to_json(block) == ["W4_G64", "packed", 34, 64, 0, 0]
    assert [dtype_from_json(dtype_to_json(d)) for d in (DTYPES["F4"], block)] == [DTYPES["F4"], block]
