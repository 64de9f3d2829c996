"""Entries and catalogues: what is known from headers."""

from __future__ import annotations

import pytest

from tensorferry.core.boxes import Box
from tensorferry.core.catalogue import Catalogue, Chunk, Span, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.errors import FormatError

F32 = DTYPES["F32"]


def test_an_ordinary_entry_is_one_span_as_long_as_its_values() -> None:
    entry = TensorEntry.at("w", F32, (2, 3), "a.safetensors", 100)
    assert entry.span == Span("a.safetensors", 100, 24)
    assert entry.nbytes == 24


def test_strides_that_are_row_major_are_not_kept() -> None:
    assert TensorEntry.at("w", F32, (2, 3), "a", 0, strides=(3, 1)).span is not None
    assert TensorEntry.at("w", F32, (2, 3), "a", 0, strides=(1, 2)).span is None


def test_an_entry_in_several_files_has_no_span_but_names_each_file_once() -> None:
    halves = tuple(Chunk(Box((a,), (a + 1,)), Span(f, 0, 4)) for a, f in enumerate(["x", "y", "x"]))
    entry = TensorEntry("w", F32, (3,), halves)
    assert entry.span is None
    assert entry.files == ("x", "y")


def test_a_catalogue_keeps_storage_order_and_adds_up_bytes() -> None:
    found = Catalogue([TensorEntry.at("b", F32, (2,), "f", 0), TensorEntry.at("a", F32, (), "f", 8)], format="raw")
    assert list(found) == ["b", "a"]
    assert found.nbytes == 12


def test_one_name_twice_is_refused_with_both_files() -> None:
    twice = [TensorEntry.at("w", F32, (2,), "one.bin", 0), TensorEntry.at("w", F32, (2,), "two.bin", 0)]
    with pytest.raises(FormatError, match=r"'w' is there twice, in one\.bin and two\.bin"):
        Catalogue(twice, format="raw")


def test_replacing_entries_keeps_what_is_known_of_the_files() -> None:
    old = Catalogue([], format="raw", files=["f"], metadata={"a": "b"}, notes=["first"])
    new = old.replacing([TensorEntry.at("w", F32, (1,), "f", 0)], notes=["second"])
    assert list(new) == ["w"]
    assert new.files == ("f",)
    assert dict(new.metadata) == {"a": "b"}
    assert new.notes == ("first", "second")


def test_metadata_cannot_be_changed() -> None:
    found = Catalogue([], format="raw", metadata={"a": "b"})
    with pytest.raises(TypeError):
        found.metadata["a"] = "c"  # type: ignore[index]
