"""Tensorizer files of our own: the library reads them, they are aligned, and nothing is left of what cannot be one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tensorferry
from helpers.checkpoints import ar
from helpers.tensorizer_library import SAMPLES, library, new_tensor, read_by_library
from helpers.tiny_transformers import equal_bits
from tensorferry.core.dtypes import DTYPES
from tensorferry.errors import ConfigError, FormatError
from tensorferry.formats.tensorizer_write import TensorizerWriter, write_tensorizer
from tensorferry.formats.writing import NewTensor, checkpoint_writer

NEW = {name: new_tensor(tensor) for name, tensor in SAMPLES.items()}


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_the_library_reads_every_type_and_verifies_its_hashes(alignment: int, lazy: bool, tmp_path: Path) -> None:
    write_tensorizer(tmp_path / "m.tensors", NEW, alignment=alignment)
    read = read_by_library(tmp_path / "m.tensors", lazy=lazy)
    assert list(read) == list(SAMPLES)
    assert [name for name, tensor in SAMPLES.items() if not equal_bits(read[name], tensor)] == []


@pytest.mark.parametrize("alignment", [64, 4096])
def test_every_tensor_is_aligned(alignment: int, tmp_path: Path) -> None:
    write_tensorizer(tmp_path / "m.tensors", NEW, alignment=alignment)
    with tensorferry.open_checkpoint(tmp_path) as checkpoint:
        spans = [entry.span for entry in checkpoint.catalogue.values()]
        values = {name: checkpoint.read(name) for name in SAMPLES}
    assert {span.offset % alignment for span in spans if span is not None} == {0}
    assert [name for name, tensor in SAMPLES.items() if not equal_bits(values[name], tensor)] == []


def test_the_writer_makes_one_file_and_knows_its_size_before(tmp_path: Path) -> None:
    writer = checkpoint_writer("tensorizer")
    assert isinstance(writer, TensorizerWriter)
    (planned,) = writer.files(NEW, metadata={}, max_shard_size=10)
    assert writer.write(tmp_path, NEW, metadata={"format": "pt"}, max_shard_size=10) == ["model.tensors"]
    assert planned == ("model.tensors", (tmp_path / "model.tensors").stat().st_size, tuple(SAMPLES))
    assert [p.name for p in tmp_path.iterdir()] == ["model.tensors"]


def test_hashes_of_what_was_written_are_right(tmp_path: Path) -> None:
    write_tensorizer(tmp_path / "m.tensors", NEW)
    assert "checksums inside 1 of 1 files" in tensorferry.verify(tmp_path).summary


class Rooted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        self.inner = nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor(7))


def test_the_library_loads_a_module_s_file_into_the_module(tmp_path: Path) -> None:
    model, empty = Rooted(), Rooted()
    state = {name: new_tensor(tensor.detach()) for name, tensor in model.state_dict().items()}
    write_tensorizer(tmp_path / "m.tensors", state, buffers={"seen"})
    with library().TensorDeserializer(str(tmp_path / "m.tensors"), "cpu", verify_hash=True) as read:
        read.load_into_module(empty)
    assert all(equal_bits(t, empty.state_dict()[name]) for name, t in model.state_dict().items())
    assert [name for name, _ in empty.named_buffers()] == ["seen"]
    with tensorferry.open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.catalogue) == set(state)


def test_dimensions_of_64_bits_are_written_where_they_are_needed(tmp_path: Path) -> None:
    huge = NewTensor(DTYPES["F32"], (1 << 33, 0), [])
    write_tensorizer(tmp_path / "m.tensors", {"huge": huge, "w": new_tensor(ar(2))})
    with tensorferry.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.catalogue["huge"].shape == (1 << 33, 0)
        assert equal_bits(checkpoint.read("w"), ar(2))
    read = read_by_library(tmp_path / "m.tensors")
    assert tuple(read["huge"].shape) == (1 << 33, 0)


REFUSED = {
    "packed": ({"w": NewTensor(DTYPES["Q4_0"], (32,), [bytes(18)])}, "no dtype Q4_0"),
    "half": ({"w": NewTensor(DTYPES["F4"], (2, 3), [bytes(3)])}, r"F4 of \[2, 3\]"),
    "short": ({"w": NewTensor(DTYPES["F32"], (2,), [bytes(7)])}, "takes 8 bytes, its chunks have 7"),
    "long": ({"w": NewTensor(DTYPES["F32"], (2,), [bytes(9)])}, "takes 8 bytes, its chunks have over 8"),
    "nameless": ({"": new_tensor(ar(2))}, "a name of 1 to"),
    "surrogate": ({"\ud800": new_tensor(ar(2))}, "lone surrogate"),
    "path": ({"\x1e[0]": new_tensor(ar(2))}, "a name of 1 to"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_format_cannot_hold_leaves_the_old_file(what: str, tmp_path: Path) -> None:
    tensors, words = REFUSED[what]
    write_tensorizer(tmp_path / "m.tensors", {"old": new_tensor(ar(2))})
    before = (tmp_path / "m.tensors").read_bytes()
    with pytest.raises(FormatError, match=words):
        write_tensorizer(tmp_path / "m.tensors", tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["m.tensors"]
    assert (tmp_path / "m.tensors").read_bytes() == before


@pytest.mark.parametrize(("option", "value"), [("alignment", 3), ("alignment", 1 << 17), ("key", b"short")])
def test_options_that_mean_nothing_are_refused(option: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=option):
        write_tensorizer(tmp_path / "m.tensors", NEW, **{option: value})  # type: ignore[arg-type]
