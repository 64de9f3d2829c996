"""Sizes as people write them, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from tensorferry.conversion.wanted import parse_size
from tensorferry.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9), ("5gb", 5 * 10**9), ("5G", 5 * 10**9), ("5GiB", 5 * 2**30), ("500MiB", 500 * 2**20),
        ("0.5kb", 500), ("1000000", 10**6), ("10 B", 10), (" 2TB ", 2 * 10**12), (4096, 4096), ("1", 1),
        ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_sizes_are_bytes_with_units_of_a_thousand_or_of_1024(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "5XB", "5 GB each", "0", 0, -1, True, 2.5, None, "5iB", "1e9", "9" * 400]
)
def test_anything_else_is_refused_with_examples(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_shard_size .*: a number of bytes is expected, such as 5GB, 500MiB"):
        parse_size(text)
