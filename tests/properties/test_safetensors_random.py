"""Random safetensors files, whole and damaged, read as the reference library reads them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from helpers.checkpoints import raw
from helpers.safetensors_bytes import NAME, attempt, catalogue, st_file
from tensorferry.core.catalogue import Catalogue
from tensorferry.errors import TensorferryError
from tensorferry.storage.local import LocalStorage

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
    max_size=6,
)


def saved(tensors: dict[str, tuple[torch.dtype, list[int]]]) -> tuple[bytes, dict[str, torch.Tensor]]:
    made = {}
    for at, (name, (dtype, shape)) in enumerate(tensors.items()):
        count = torch.zeros(shape).numel()
        made[name] = (torch.arange(count) + at).remainder(2).to(dtype).reshape(shape)
    return save(made, {"format": "pt"}), made


@given(tensors=TENSORS)
def test_random_files_are_catalogued_as_the_reference_library_does(
    tensors: dict[str, tuple[torch.dtype, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("random")
    content, made = saved(tensors)
    found = catalogue(folder, content)
    with LocalStorage(folder) as storage, safe_open(folder / NAME, "pt") as reference:
        assert set(found) == set(reference.keys())
        assert dict(found.metadata) == reference.metadata()
        for name, entry_ in found.items():
            assert entry_.dtype.name == reference.get_slice(name).get_dtype()
            assert list(entry_.shape) == reference.get_slice(name).get_shape()
            assert entry_.span is not None
            data = bytearray(entry_.span.length)
            storage.read_into(NAME, entry_.span.offset, memoryview(data))
            assert data == raw(made[name])
    offsets = [entry_.span.offset for entry_ in found.values() if entry_.span is not None]
    assert offsets == sorted(offsets)


@given(tensors=TENSORS, data=st.data())
def test_a_changed_byte_is_refused_in_words_or_changes_nothing_that_matters(
    tensors: dict[str, tuple[torch.dtype, list[int]]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    content = bytearray(saved(tensors)[0])
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    found = attempt(folder, bytes(content))
    if isinstance(found, TensorferryError):
        assert NAME in str(found)
        return
    with safe_open(folder / NAME, "pt") as reference:  # we accept nothing that the reference refuses
        assert set(found) == set(reference.keys())
    header = 8 + int.from_bytes(content[:8], "little")
    assert sum(entry_.nbytes for entry_ in found.values()) == len(content) - header


@given(header=st.binary(max_size=80))
def test_random_headers_raise_nothing_but_our_errors(header: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = attempt(tmp_path_factory.mktemp("noise"), st_file(b"{" + header))
    assert isinstance(found, Catalogue) or NAME in str(found)
