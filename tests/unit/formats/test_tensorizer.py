"""Files that the tensorizer library writes: every type, names of modules and of nested dictionaries, and hashes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorferry
from helpers.checkpoints import ar
from helpers.tensorizer_library import SAMPLES, write_by_library
from helpers.tiny_transformers import equal_bits
from tensorferry.errors import CorruptFile
from tensorferry.formats.tensorizer_hashes import verify_hashes
from tensorferry.formats.tensorizer_header import TensorKind, read_header
from tensorferry.storage.local import LocalStorage


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_by_library(tmp_path_factory.mktemp("tensorizer") / "model.tensors", dict(SAMPLES))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_tensor_of_every_type_has_the_bits_that_were_written(name: str, written: Path) -> None:
    with tensorferry.open_checkpoint(written) as checkpoint:
        assert equal_bits(checkpoint.read(name), SAMPLES[name])


def test_entries_are_spans_in_the_order_of_the_file(written: Path) -> None:
    with tensorferry.open_checkpoint(written.parent) as checkpoint:
        catalogue = checkpoint.catalogue
        spans = [entry.span for entry in catalogue.values()]
    assert (catalogue.format, catalogue.files, list(catalogue)) == ("tensorizer", ("model.tensors",), list(SAMPLES))
    assert all(span is not None and span.file == "model.tensors" for span in spans)
    assert spans == sorted(spans, key=lambda span: span.offset if span else -1)


def test_a_packed_type_has_its_shape_in_elements(written: Path) -> None:
    with tensorferry.open_checkpoint(written) as checkpoint:
        assert checkpoint.catalogue["float4_e2m1fn_x2"].shape == (2, 6)


def test_keys_and_numbers_of_nested_containers_join_with_dots(tmp_path: Path) -> None:
    file = write_by_library(tmp_path / "m.tensors", {"layers": [{"w": ar(2)}, {"w": ar(3)}], "n.w": ar(4)})
    with tensorferry.open_checkpoint(file) as checkpoint:
        assert list(checkpoint.catalogue) == ["layers.0.w", "layers.1.w", "n.w"]


def test_a_dotted_name_that_is_also_a_path_is_refused(tmp_path: Path) -> None:
    file = write_by_library(tmp_path / "m.tensors", {"a": [ar(2)], "a.0": ar(2)})
    with pytest.raises(CorruptFile, match=r"m\.tensors.*duplicate name: a tensor 'a\.0' is there twice"):
        tensorferry.open_checkpoint(file)


class Rooted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        self.inner = nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor(7))


def test_a_module_has_the_names_of_its_state_and_what_each_tensor_is(tmp_path: Path) -> None:
    model = Rooted()
    file = write_by_library(tmp_path / "m.tensors", model)
    storage = LocalStorage(tmp_path)
    kinds = {t.name: t.kind for t in read_header(storage, storage.stat(file.name)).tensors}
    assert kinds == {
        "scale": TensorKind.PARAMETER,
        "seen": TensorKind.BUFFER,
        "inner.weight": TensorKind.PARAMETER,
        "inner.bias": TensorKind.PARAMETER,
    }
    filled = Rooted()
    with torch.no_grad():
        filled.scale.zero_()
    tensorferry.load(filled, file)
    assert all(equal_bits(t, filled.state_dict()[name]) for name, t in model.state_dict().items())


def test_tensors_without_data_are_left_out_and_told(tmp_path: Path) -> None:
    file = write_by_library(tmp_path / "m.tensors", {"w": ar(2), "ghost": torch.empty(3, device="meta")})
    with tensorferry.open_checkpoint(file) as checkpoint:
        assert list(checkpoint.catalogue) == ["w"]
        assert "1 tensor without data, ghost, left out" in checkpoint.warnings[0]


# -- hashes


def hashed(path: Path, workers: int = 1) -> int:
    storage = LocalStorage(path.parent)
    return verify_hashes(storage, storage.stat(path.name), workers=workers)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_hashes_of_all_bytes_are_verified(workers: int, written: Path) -> None:
    assert hashed(written, workers=workers) == sum(t.nbytes for t in SAMPLES.values())


@pytest.mark.parametrize("name", ["bool", "scalar", "boxes"])
def test_a_wrong_byte_names_file_and_tensor(name: str, written: Path, tmp_path: Path) -> None:
    with tensorferry.open_checkpoint(written) as checkpoint:
        span = checkpoint.catalogue[name].span
    assert span is not None
    damaged = bytearray(written.read_bytes())
    damaged[span.offset + span.length - 1] ^= 1
    (tmp_path / "bad.tensors").write_bytes(damaged)
    with pytest.raises(CorruptFile, match=rf"bad\.tensors.*of tensor '{name}' is [0-9a-f]+, its header says"):
        hashed(tmp_path / "bad.tensors")


def test_a_wrong_hash_of_the_two_is_enough(written: Path, tmp_path: Path) -> None:
    storage = LocalStorage(written.parent)
    tensor = next(t for t in read_header(storage, storage.stat(written.name)).tensors if t.name == "int8")
    for number, (_, at, value) in enumerate(tensor.hashes):
        damaged = bytearray(written.read_bytes())
        damaged[tensor.header + at + len(value) - 1] ^= 1
        (tmp_path / f"{number}.tensors").write_bytes(damaged)
        with pytest.raises(CorruptFile, match="of tensor 'int8' is"):
            hashed(tmp_path / f"{number}.tensors")


def test_verify_compares_the_hashes_inside_and_says_so(written: Path) -> None:
    found = tensorferry.verify(written)
    assert found.files[0].checksummed == sum(t.nbytes for t in SAMPLES.values())
    assert found.summary == "checksums inside 1 of 1 files verified"


def test_verifying_holds_a_piece_for_each_thread_and_no_tensor(written: Path) -> None:
    hashed(written, workers=1)
    tracemalloc.start()
    try:
        hashed(written, workers=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert SAMPLES["boxes"].nbytes > 4_700_000 > 3_000_000 > peak
