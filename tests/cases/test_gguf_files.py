"""Reported failures with GGUF files: unknown types, alignment, empty tensors, ties, vocabularies."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.gguf_bytes import F32, I32, STRING, U32, T, gguf, kv
from tensorferry import CorruptFile, PlanError, UnsupportedDtype, load, open_checkpoint


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def llama(align: int = 32, kind: int = U32) -> list[bytes]:
    return [
        kv("general.architecture", STRING, "llama"),
        kv("general.alignment", kind, align),
        kv("llama.block_count", U32, 1),
    ]


def test_gguf_03_an_unknown_type_is_named_with_its_number_before_data_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([T("t", (32,), 200, bytes(32)), T("w", (2,), F32, floats(1, 2))], llama()))
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint.catalogue) == ["t", "w"]
        assert checkpoint.read("w").tolist() == [1, 2]
        for read in (checkpoint.tensors, lambda: checkpoint.read("t")):
            with pytest.raises(UnsupportedDtype, match=r"'t'.*200"):
                read()
    model = nn.ParameterDict({"t": nn.Parameter(torch.ones(32)), "w": nn.Parameter(torch.ones(2))})
    with pytest.raises(PlanError, match=r"t.*200") as refusal:
        load(model, path)
    assert not refusal.value.touched
    assert model["w"].tolist() == [1, 1]


@pytest.mark.parametrize(("align", "kind"), [(0, U32), (24, U32), (32, I32)])
def test_gguf_05_an_alignment_that_is_none_is_refused(tmp_path: Path, align: int, kind: int) -> None:
    (tmp_path / "bad.gguf").write_bytes(gguf([T("a", (2,), F32, floats(0, 1))], llama(align, kind)))
    with pytest.raises(CorruptFile, match=r"bad\.gguf.*alignment"):
        open_checkpoint(tmp_path)


def test_gguf_05_an_alignment_of_64_is_followed(tmp_path: Path) -> None:
    tensors = [T("a", (2,), F32, floats(0, 1)), T("b", (2,), F32, floats(5, 6))]
    (tmp_path / "ok64.gguf").write_bytes(gguf(tensors, llama(64), align=64))
    with open_checkpoint(tmp_path) as checkpoint:
        spans = [entry.span for entry in checkpoint.catalogue.values()]
        assert checkpoint.read("b").tolist() == [5, 6]
    assert [span.offset % 64 for span in spans if span] == [0, 0]
    assert spans[0] is not None
    assert spans[1] is not None
    assert spans[1].offset == spans[0].offset + 64


def test_gguf_07_a_dimension_of_zero_is_legal(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf([T("e", (4, 0), F32, b""), T("w", (2,), F32, floats(1, 2))], llama()))
    model = nn.ParameterDict({"e": nn.Parameter(torch.ones(0, 4)), "w": nn.Parameter(torch.zeros(2))})
    load(model, tmp_path)
    assert (model["e"].shape, model["w"].tolist()) == ((0, 4), [1, 2])


def test_gguf_08_a_tied_file_has_no_output_and_is_whole(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf([T("token_embd.weight", (2, 2), F32, floats(1, 2, 3, 4))], llama()))
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.catalogue) == ["token_embd.weight"]
        assert not checkpoint.warnings


def test_gguf_09_rope_freqs_are_an_entry_like_others(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf([T("rope_freqs.weight", (2,), F32, floats(1, 8))], llama()))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("rope_freqs.weight").tolist() == [1, 8]


def test_gguf_11_weights_load_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf([T("w", (2,), F32, floats(1, 2))], llama()))
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2))})
    load(model, tmp_path)
    assert model["w"].tolist() == [1, 2]


def test_gguf_11_a_vocabulary_is_a_file_and_no_model(tmp_path: Path) -> None:
    (tmp_path / "vocab.gguf").write_bytes(gguf((), llama()))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.warnings == ("vocab.gguf: no tensors (vocabulary only?)",)
    with pytest.raises(PlanError, match=r"no tensors \(vocabulary only\?\)"):
        load(nn.Linear(2, 2), tmp_path)
