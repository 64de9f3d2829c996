"""Reported failures of damaged torch files."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.checkpoints import ar
from helpers.torch_files import catalogue_of, catalogue_of_bytes, legacy, saved
from tensorferry.errors import CorruptFile, TensorferryError


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_corr_14_a_truncated_zip_is_named_with_its_size(name: str, tmp_path: Path) -> None:
    whole = saved({"w": ar(1000)})
    half = len(whole) // 2
    with pytest.raises(CorruptFile, match=rf"{name}: .*{half:,} bytes: incomplete download\?"):
        catalogue_of_bytes(tmp_path, whole[:half], name)


def test_corr_14_a_truncated_legacy_file_is_named_with_the_tensor_and_both_sizes(tmp_path: Path) -> None:
    whole = legacy({"fc.weight": ar(1000)})
    half = len(whole) // 2
    with pytest.raises(CorruptFile) as error:
        catalogue_of_bytes(tmp_path, whole[:half], "pytorch_model.bin")
    said = str(error.value)
    assert "pytorch_model.bin: truncated" in said
    assert "'fc.weight'" in said
    assert f"byte {len(whole):,}, the file has {half:,}; incomplete download?" in said


@pytest.mark.parametrize("write", [saved, legacy], ids=["zip", "legacy"])
def test_corr_14_no_beginning_of_a_file_is_taken_for_the_file(write: object, tmp_path: Path) -> None:
    assert callable(write)
    whole = write({"w": ar(3), "v": ar(2, 2)})
    path = tmp_path / "m.pt"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TensorferryError, match=r"m\.pt: "):
            catalogue_of(path)
