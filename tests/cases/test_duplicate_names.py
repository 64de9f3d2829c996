"""Reported failures with one tensor name in several files."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.checkpoints import ar, write_safetensors
from helpers.reading import as_lists, tensors_of
from tensorferry.errors import FormatError
from tensorferry.formats.opening import open_files


def test_keys_12_different_values_under_one_name_are_refused_with_both_files(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"w": ar(1, start=0)})
    write_safetensors(tmp_path / "b.safetensors", {"w": ar(1, start=1)})
    with pytest.raises(FormatError, match=r"duplicate name.*'w'.*a\.safetensors.*b\.safetensors"):
        open_files(tmp_path)


def test_keys_12_equal_values_under_one_name_are_loaded_once_with_a_warning(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"w": ar(2)})
    write_safetensors(tmp_path / "b.safetensors", {"w": ar(2)})
    with open_files(tmp_path) as opened:
        assert as_lists(tensors_of(opened)) == {"w": [0, 1]}
        assert opened.catalogue.nbytes == 8
        assert "w is in a.safetensors and again in b.safetensors, with equal bytes" in opened.warnings[0]
