"""Every format that is written here holds every tensor as it was, and gives it back. Subclass it for another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

import tensorferry
from helpers.checkpoints import ar, write_safetensors
from helpers.tiny_transformers import equal_bits
from tensorferry import ReadOptions, convert
from tensorferry.formats.writing import WRITERS, checkpoint_writer

TENSORS: dict[str, torch.Tensor] = {
    "model.layers.0.weight": ar(40, 30, dtype=torch.bfloat16), "model.layers.0.bias": ar(30),
    "model.layers.10.half": ar(3, 2, dtype=torch.float16), "double": ar(2, 2, dtype=torch.float64),
    "flag": torch.tensor([True, False]), "i8": ar(3, dtype=torch.int8), "u8": ar(3, dtype=torch.uint8),
    "i16": ar(3, dtype=torch.int16), "i32": ar(3, dtype=torch.int32), "i64": ar(3, dtype=torch.int64),
    "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "größe": ar(2), "large": ar(300, 300),
}  # fmt: skip


class ConversionConformance:
    """What a writer has to keep to. Set `to`, and `load_format` where "auto" does not find what it writes."""

    to: ClassVar[str]
    load_format: ClassVar[str] = "auto"
    opening: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        write_safetensors(tmp_path / "src" / "model.safetensors", TENSORS)
        (tmp_path / "src" / "config.json").write_text('{"model_type": "x"}')
        return tmp_path / "src"

    def assert_holds_them(self, folder: Path) -> None:
        with tensorferry.open_checkpoint(folder, load_format=self.load_format) as checkpoint:
            found = dict(checkpoint.tensors())
        assert found.keys() == TENSORS.keys()
        assert [name for name, tensor in TENSORS.items() if not equal_bits(found[name], tensor)] == []

    def test_every_tensor_is_there_as_it_was(self, source: Path, tmp_path: Path) -> None:
        account = convert(source, tmp_path / "out", to=self.to)
        self.assert_holds_them(tmp_path / "out")
        assert account.to == self.to
        assert account.verified.endswith("read back and equal")
        assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "x"}'

    def test_in_small_portions_and_small_files_it_is_the_same(self, source: Path, tmp_path: Path) -> None:
        options = ReadOptions(max_staging=16384, max_read=4096)
        shards: Any = {"max_shard_size": 10000} if checkpoint_writer(self.to).has_shards else {}
        account = convert(source, tmp_path / "out", to=self.to, options=options, **shards)
        self.assert_holds_them(tmp_path / "out")
        assert account.staging_peak <= 16384
        assert account.bytes_read < 2.5 * account.nbytes, "its tensors were asked for in another order than announced"

    def test_it_comes_back_as_the_safetensors_file_that_it_was(self, source: Path, tmp_path: Path) -> None:
        convert(source, tmp_path / "there", to=self.to)
        convert(tmp_path / "there", tmp_path / "back", load_format=self.load_format)
        assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["config.json", "model.safetensors"]
        found = load_file(tmp_path / "back" / "model.safetensors")
        assert [name for name, tensor in TENSORS.items() if not equal_bits(found[name], tensor)] == []

    def test_what_is_told_of_the_files_is_what_is_there(self, source: Path, tmp_path: Path) -> None:
        told = convert(source, tmp_path / "out", to=self.to, dry_run=True)
        account = convert(source, tmp_path / "out", to=self.to)
        assert told.files in ({}, account.files)
        there = {p.relative_to(tmp_path / "out").as_posix(): p.stat().st_size for p in (tmp_path / "out").rglob("*")}
        assert all(there[name] == size for name, size in account.files.items())

    def test_no_tensors_are_a_checkpoint_too(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "src" / "model.safetensors", {})
        assert convert(tmp_path / "src", tmp_path / "out", to=self.to).tensors == 0


class TestSafetensors(ConversionConformance):
    to = "safetensors"


class TestNpcache(ConversionConformance):
    to = load_format = "npcache"


class TestShardedState(ConversionConformance):
    to = load_format = "sharded_state"


class TestTensorizer(ConversionConformance):
    to = load_format = "tensorizer"


def test_every_writer_is_held_to_this() -> None:
    held = {kind.to for kind in ConversionConformance.__subclasses__()}
    assert held >= set(WRITERS)
