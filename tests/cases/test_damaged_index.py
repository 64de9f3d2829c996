"""Reported failures with damaged shard indexes."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.checkpoints import ar, write_safetensors
from tensorferry.errors import CorruptFile
from tensorferry.formats.opening import open_files

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("content", ['{"weight_map": {"a":', "[]", "{}", '{"weight_map": {}}'])
def test_corr_13_an_index_without_a_map_is_corrupt_and_the_files_beside_are_not_taken_instead(
    tmp_path: Path, content: str
) -> None:
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", {"a": ar(2)})
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CorruptFile, match=INDEX):
        open_files(tmp_path)
