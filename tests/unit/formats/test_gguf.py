"""GGUF files are catalogued as gguf-py reads them: names, types, shapes, offsets; and as the format says by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from helpers.gguf_bytes import BOOL, F16, F32, FLOAT, I32, NAME, Q4_0, STRING, U8, U16, T, catalogue, gguf, kv
from tensorferry import load, open_checkpoint
from tensorferry.core.catalogue import Span
from tensorferry.core.dtypes import DTYPES, Kind
from tensorferry.errors import PlanError, UnsupportedDtype
from tensorferry.formats.gguf_types import GGML_TYPES, REMOVED_TYPES, ggml_type

gguf_py = pytest.importorskip("gguf", reason="gguf-py is the second opinion")


# -- as gguf-py has it


def test_every_type_of_gguf_py_is_known_with_its_size() -> None:
    theirs = {kind.value: (kind.name, *gguf_py.GGML_QUANT_SIZES[kind]) for kind in gguf_py.GGMLQuantizationType}
    theirs[9] = ("Q8_1", 32, 36)  # gguf-py says 40 bytes, C says 36
    ours = {number: (d.name, d.block, d.block_bytes) for number, d in GGML_TYPES.items()}
    assert {number: ours[number] for number in theirs} == theirs
    assert set(ours) - set(theirs) <= {41, 42}  # younger than gguf-py 0.17
    assert not REMOVED_TYPES & set(ours)


def written(path: Path, *, big: bool = False) -> Path:
    order = gguf_py.GGUFEndian.BIG if big else gguf_py.GGUFEndian.LITTLE
    writer = gguf_py.GGUFWriter(path, "llama", endianess=order)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_token_list(["<s>", "a", "é"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    rng = np.random.default_rng(0)
    for name, shape, dtype in (
        ("f32", (3, 5), np.float32),
        ("f16", (2, 3, 4), np.float16),
        ("i8", (7,), np.int8),
        ("four", (2, 1, 2, 3), np.float32),
    ):
        writer.add_tensor(name, rng.integers(-9, 9, shape).astype(dtype))
    if not big:
        writer.add_tensor("f64", rng.random((2, 2)))
        writer.add_tensor("i64", rng.integers(0, 9, (3,)))
        for kind in ("Q4_0", "Q8_0", "BF16", "Q5_1"):
            quantized = gguf_py.quantize(
                rng.random((4, 64), dtype=np.float32), getattr(gguf_py.GGMLQuantizationType, kind)
            )
            writer.add_tensor(kind, quantized, raw_dtype=getattr(gguf_py.GGMLQuantizationType, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_names_types_shapes_and_places_are_those_of_gguf_py(tmp_path: Path) -> None:
    reader = gguf_py.GGUFReader(written(tmp_path / NAME))
    theirs = {
        t.name: (t.tensor_type.name, tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes)
        for t in reader.tensors
    }
    with open_checkpoint(tmp_path / NAME) as checkpoint:
        spans = {e.name: (e.dtype.name, e.shape, e.span) for e in checkpoint.catalogue.values()}
        assert not checkpoint.warnings
    assert {n: (d, s, p.offset, p.length) for n, (d, s, p) in spans.items() if p is not None} == theirs


def test_values_are_those_that_were_written(tmp_path: Path) -> None:
    reader = gguf_py.GGUFReader(written(tmp_path / NAME))
    with open_checkpoint(tmp_path) as checkpoint:
        for tensor in reader.tensors:
            found = checkpoint.read(tensor.name)
            assert found.view(torch.uint8).numpy().tobytes() == tensor.data.tobytes()


# -- by hand


def test_tensors_come_in_torch_order_and_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    found = catalogue(tmp_path, gguf([T("b", (3, 2), data=bytes(24), offset=32), T("a", (4,), F16, offset=0)]))
    assert [(e.name, e.dtype, e.shape) for e in found.values()] == [
        ("a", DTYPES["F16"], (4,)),
        ("b", DTYPES["F32"], (2, 3)),
    ]


def test_offsets_count_from_the_aligned_end_of_the_header(tmp_path: Path) -> None:
    # 24 bytes; the tensor's description: 8 + 1 for the name, 4, 8, 4 and 8; padded from 57 to 64
    assert catalogue(tmp_path, gguf())["t"].span == Span(NAME, 64, 8)


def test_metadata_are_text_and_arrays_are_left_out(tmp_path: Path) -> None:
    pairs = [
        kv("general.architecture", STRING, "llama"),
        kv("llama.block_count", U16, 2),
        kv("eps", FLOAT, 1e-6),
        kv("flag", BOOL, 1),
        kv("empty", STRING, ""),
        kv("odd", STRING, struct.pack("<Q", 2) + b"\xff\n"),
        kv("scores", 9, struct.pack("<IQ", U8, 2) + b"\1\2"),
    ]
    assert dict(catalogue(tmp_path, gguf(pairs=pairs)).metadata) == {
        "general.architecture": "llama",
        "llama.block_count": "2",
        "eps": "1e-06",
        "flag": "true",
        "empty": "",
        "odd": "\ufffd\n",
    }


def test_holes_and_another_order_are_noted(tmp_path: Path) -> None:
    tensors = [T("b", offset=64), T("a", offset=0, data=bytes(72))]
    assert catalogue(tmp_path, gguf(tensors)).notes == (
        f"{NAME}: its tensors lie in another order than its header lists them",
        f"{NAME}: bytes 104 to 160, before 'b', belong to no tensor",
    )


def test_padding_is_no_hole(tmp_path: Path) -> None:
    assert catalogue(tmp_path, gguf([T("a"), T("b"), T("z", (0,), data=b""), T("c")])).notes == ()


def test_no_tensors_are_noted(tmp_path: Path) -> None:
    assert catalogue(tmp_path, gguf(())).notes == (f"{NAME}: no tensors (vocabulary only?)",)


# -- types that are not known


def with_unknown(folder: Path, number: int = 200) -> Path:
    tensors = [T("a", (2,), F32, struct.pack("<2f", 1, 2)), T("odd", (32, 2), number, bytes(32)), T("b")]
    (folder / NAME).write_bytes(gguf(tensors))
    return folder / NAME


@pytest.mark.parametrize(("number", "name"), [(200, "ggml type 200"), (31, r"ggml type 31 \(removed from ggml\)")])
def test_an_unknown_type_spoils_only_its_tensor(tmp_path: Path, number: int, name: str) -> None:
    with open_checkpoint(with_unknown(tmp_path, number)) as checkpoint:
        assert checkpoint.catalogue["odd"].shape == (2, 32)
        assert checkpoint.read("a").tolist() == [1, 2]
        assert [n for n, _ in checkpoint.tensors(["a", "b"])] == ["a", "b"]
        with pytest.raises(UnsupportedDtype, match=f"'odd' has the type '{name}'"):
            checkpoint.read("odd")
        with pytest.raises(UnsupportedDtype, match=f"'odd' has the type '{name}'"):
            checkpoint.tensors()
        (warning,) = checkpoint.warnings
    assert warning.endswith(f"of the type {name}: odd".replace("\\", ""))


def test_a_model_that_does_not_need_it_is_loaded(tmp_path: Path) -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2))})
    load(model, with_unknown(tmp_path))
    assert model["a"].tolist() == [1, 2]


def test_a_model_that_needs_it_is_refused_and_not_touched(tmp_path: Path) -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2)), "odd": nn.Parameter(torch.zeros(2, 32))})
    with pytest.raises(PlanError, match=r"odd.*ggml type 200"):
        load(model, with_unknown(tmp_path))
    assert model["a"].tolist() == [0, 0]


# -- the other byte order


def test_big_endian_files_of_gguf_py_hold_the_same_numbers(tmp_path: Path) -> None:
    written(tmp_path / "big.gguf", big=True)
    written(tmp_path / "little.gguf")
    models = []
    for name in ("big.gguf", "little.gguf"):
        model = nn.ParameterDict(
            {
                "f32": nn.Parameter(torch.zeros(3, 5)),
                "f16": nn.Parameter(torch.zeros(2, 3, 4, dtype=torch.bfloat16)),
                "four": nn.Parameter(torch.zeros(2, 1, 2, 3)),
            }
        )
        load(model, tmp_path / name)
        models.append(model.state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])


def test_big_endian_metadata_and_values_by_hand(tmp_path: Path) -> None:
    tensors = [
        T("s", (), F32, struct.pack(">f", 3)),
        T("h", (2, 2), F16, struct.pack(">4e", 1, 2, 3, 4)),
        T("b", (2,), 30, b"\x3f\x80\xc0\x00"),
        T("i", (2,), 24, b"\1\2"),
    ]
    path = tmp_path / NAME
    path.write_bytes(gguf(tensors, [kv("n", I32, -2, ">"), kv("w", STRING, "é", ">")], order=">"))
    model = nn.ParameterDict(
        {
            "s": nn.Parameter(torch.zeros(())),
            "h": nn.Parameter(torch.zeros(2, 2)),
            "b": nn.Parameter(torch.zeros(2)),
            "i": nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False),
        }
    )
    load(model, path)
    assert {n: p.tolist() for n, p in model.items()} == {"s": 3, "h": [[1, 2], [3, 4]], "b": [1, -2], "i": [1, 2]}
    with open_checkpoint(path) as checkpoint:
        assert dict(checkpoint.catalogue.metadata) == {"n": "-2", "w": "é"}


@pytest.mark.parametrize("number", [Q4_0, 12, 26, 28])
def test_big_endian_blocks_and_wide_integers_are_not_read_and_it_is_said_what_to_do(
    tmp_path: Path, number: int
) -> None:
    found = catalogue(tmp_path, gguf([T("t", (256,), number, bytes(2048))], order=">"))
    assert found["t"].dtype.kind is Kind.UNKNOWN
    assert found.notes[0].endswith(
        f"{ggml_type(number).name} big-endian: t; convert the file to little-endian (gguf-convert-endian)"
    )
