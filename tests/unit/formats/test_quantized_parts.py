"""How torchao's and MLX's checkpoints are recognised: listed as they lie, told in words, never loaded as weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from helpers.checkpoints import ar
from tensorferry import PlanError, Strictness, load, open_checkpoint
from tensorferry.cli.main import app
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.formats.quantized_parts import describe_parts
from tensorferry.loaders import LoadConfig, ModelConfig, get_model_loader

INT8 = json.dumps(
    {
        "_type": "Int8Tensor",
        "_data": {
            "act_quant_kwargs": None,
            "reduce_range": False,
            "block_size": [1, 64],
            "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
        },
        "_tensor_data_names": ["zero_point", "qdata", "scale"],
    }
)
FLOAT8 = json.dumps(
    {"_type": "Float8Tensor", "_data": {"block_size": [1, 64]}, "_tensor_data_names": ["qdata", "scale"]}
)
PLAIN = json.dumps({"_type": "Tensor"})
"""What torchao 0.18 writes of a weight that it quantized to eight bits, and of others."""


def int8_parts(name: str) -> dict[str, torch.Tensor]:
    return {
        f"{name}._weight_qdata": ar(8, 64, dtype=torch.int8),
        f"{name}._weight_scale": ar(8, 1),
        f"{name}._weight_zero_point": ar(8, 1, dtype=torch.int8),
    }


def write_torchao(path: Path, tensors: Mapping[str, torch.Tensor], told: Mapping[str, str]) -> Path:
    save_file(dict(tensors), str(path), {**told, "tensor_names": json.dumps(list(told))})
    return path


def write_mlx(
    folder: Path, modules: Mapping[str, tuple[int, int]], quantization: Mapping[str, Any] | None, *, biases: bool = True
) -> Path:
    """Write weights of 8 rows of 128, with (bits, group) of each module, as mlx_lm does."""
    tensors = {}
    for name, (bits, group) in modules.items():
        tensors[f"{name}.weight"] = torch.zeros(8, 128 * bits // 32, dtype=torch.uint32)
        tensors[f"{name}.scales"] = ar(8, 128 // group, dtype=torch.bfloat16)
        if biases:
            tensors[f"{name}.biases"] = ar(8, 128 // group, dtype=torch.bfloat16)
    save_file(tensors, str(folder / "model.safetensors"), {"format": "mlx"})
    if quantization is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization": quantization}))
    return folder


def notes(path: Path) -> list[str]:
    with open_checkpoint(path) as checkpoint:
        return [note for note in checkpoint.warnings if note.startswith("quantized by ")]


def test_torchao_s_classes_are_counted_with_the_names_of_their_parts(tmp_path: Path) -> None:
    tensors = {**int8_parts("0"), "0.bias": ar(8), **int8_parts("1"), "1.bias": ar(8)}
    told = {"0.weight": INT8, "0.bias": PLAIN, "1.weight": INT8, "1.bias": PLAIN}
    path = write_torchao(tmp_path / "model.safetensors", tensors, told)
    (note,) = notes(path)
    assert note.startswith(
        "quantized by torchao: Int8Tensor in 2 weights, each in parts (zero_point, qdata, scale); the parts are listed"
    )
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.catalogue) == set(tensors)
        assert checkpoint.catalogue["0._weight_qdata"].dtype.name == "I8"
        assert torch.equal(checkpoint.read("0._weight_scale"), tensors["0._weight_scale"])


def test_torchao_s_parts_may_lie_in_different_shards(tmp_path: Path) -> None:
    parts = int8_parts("0")
    first = {"0._weight_qdata": parts.pop("0._weight_qdata")}
    eight = {"1._weight_qdata": torch.zeros(8, 64).to(torch.float8_e4m3fn), "1._weight_scale": ar(8, 1)}
    write_torchao(tmp_path / "model-00001-of-00002.safetensors", first, {"0.weight": INT8})
    write_torchao(tmp_path / "model-00002-of-00002.safetensors", {**parts, **eight}, {"1.weight": FLOAT8})
    (note,) = notes(tmp_path)
    assert "Int8Tensor in 1 weight, each" in note
    assert "Float8Tensor in 1 weight, each in parts (qdata, scale)" in note
    assert "absent" not in note


def test_a_part_that_is_absent_is_named(tmp_path: Path) -> None:
    parts = int8_parts("0")
    del parts["0._weight_scale"]
    (note,) = notes(write_torchao(tmp_path / "model.safetensors", parts, {"0.weight": INT8}))
    assert "1 part absent (0._weight_scale)" in note


def test_the_names_that_torchao_gave_parts_before_are_known_too() -> None:
    entries = [TensorEntry.at(f"0.weight:{part}", DTYPES["F32"], (1,), "f", 0) for part in ("qdata", "scale")]
    metadata = {"tensor_names": '["0.weight"]', "0.weight": FLOAT8}
    (note,) = describe_parts(Catalogue(entries, format="safetensors", metadata=metadata))
    assert "absent" not in note


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": "pt"},
        {"0.weight": INT8},
        {"tensor_names": "[]"},
        {"tensor_names": '["0.weight"]', "0.weight": PLAIN},
        {"tensor_names": '["0.weight"]', "0.weight": "no JSON"},
        {"tensor_names": '["0.weight"]', "0.weight": "{" * 100},
        {"tensor_names": '["0.weight"]', "0.weight": '{"_type": 1, "_tensor_data_names": 2}'},
        {"tensor_names": '["0.weight"]', "0.weight": '{"_type": "A", "_type": "B", "_tensor_data_names": []}'},
    ],
)
def test_other_metadata_are_not_torchao_s(metadata: dict[str, str]) -> None:
    assert describe_parts(Catalogue([], format="safetensors", metadata=metadata)) == []


def test_mlx_s_bits_and_groups_come_from_config_json(tmp_path: Path) -> None:
    folder = write_mlx(tmp_path, {"a": (4, 64), "b": (4, 64)}, {"group_size": 64, "bits": 4})
    (note,) = notes(folder)
    assert note.startswith(
        "quantized by MLX: 4-bit groups of 64 (affine) in 2 weights, each in parts (weight, scales, biases); the parts"
    )
    with open_checkpoint(folder) as checkpoint:
        assert {(e.dtype.name, e.shape) for e in checkpoint.catalogue.values()} == {
            ("U32", (8, 16)),
            ("BF16", (8, 2)),
        }


def test_mlx_s_modules_may_be_coded_in_ways_of_their_own(tmp_path: Path) -> None:
    told = {"group_size": 64, "bits": 4, "b": {"group_size": 32, "bits": 8}, "c": False}
    (note,) = notes(write_mlx(tmp_path, {"a": (4, 64), "b": (8, 32)}, told))
    assert "4-bit groups of 64 (affine) in 1 weight, 8-bit groups of 32 (affine) in 1 weight" in note


def test_mlx_s_floating_point_modes_have_no_biases(tmp_path: Path) -> None:
    told = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    (note,) = notes(write_mlx(tmp_path, {"a": (4, 32)}, told, biases=False))
    assert "4-bit groups of 32 (mxfp4) in 1 weight, each in parts (weight, scales);" in note


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (None, "1 weight whose bits and groups no config.json tells"),
        ({"group_size": 128, "bits": 4}, "config.json does not tell rightly"),
        ({"group_size": "64", "bits": 4}, "config.json does not tell rightly"),
        ({}, "config.json does not tell rightly"),
    ],
)
def test_what_config_json_does_not_say_is_not_guessed(
    tmp_path: Path, quantization: dict[str, Any] | None, words: str
) -> None:
    (note,) = notes(write_mlx(tmp_path, {"a": (4, 64)}, quantization))
    assert words in note


@pytest.mark.parametrize("config", [b"", b"{", b"[1]", b'{"quantization": 5}', b"\xff\xfe", b"{" + b" " * (2 << 20)])
def test_a_config_json_that_cannot_be_read_stops_nobody(tmp_path: Path, config: bytes) -> None:
    write_mlx(tmp_path, {"a": (4, 64)}, None)
    (tmp_path / "config.json").write_bytes(config)
    assert len(notes(tmp_path)) == 1


def test_a_folder_of_mlx_without_quantization_is_plain(tmp_path: Path) -> None:
    save_file({"a.weight": ar(2, 2), "ids": torch.zeros(2, dtype=torch.uint32)}, str(tmp_path / "m.safetensors"))
    assert notes(tmp_path) == []


class Plain(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a = nn.Linear(columns, rows, bias=False)


def test_mlx_s_weights_do_not_fit_an_unquantized_model_and_the_message_says_why(tmp_path: Path) -> None:
    write_mlx(tmp_path, {"a": (4, 64)}, {"group_size": 64, "bits": 4})
    model = Plain(8, 128)
    before = model.a.weight.detach().clone()
    with pytest.raises(PlanError, match=r"(?s)a\.weight.*quantized by MLX: 4-bit groups of 64") as refusal:
        load(model, tmp_path)
    assert not refusal.value.touched
    assert torch.equal(model.a.weight, before)


def test_not_even_where_the_shapes_happen_to_agree(tmp_path: Path) -> None:
    write_mlx(tmp_path, {"a": (4, 64)}, {"group_size": 64, "bits": 4})
    with pytest.raises(PlanError, match=r"(?s)U32.*quantized by MLX"):
        load(Plain(8, 16), tmp_path)


def test_torchao_s_weights_do_not_fit_an_unquantized_model_and_the_message_says_why(tmp_path: Path) -> None:
    write_torchao(tmp_path / "model.safetensors", int8_parts("a"), {"a.weight": INT8})
    words = r"(?s)missing: a\.weight.*quantized by torchao: Int8Tensor in 1 weight"
    with pytest.raises(PlanError, match=words) as refusal:
        load(Plain(8, 64), tmp_path)
    assert not refusal.value.touched
    loader = get_model_loader(LoadConfig())
    with pytest.raises(PlanError, match=words):
        loader.load_model(ModelConfig(str(tmp_path)), build=lambda _: Plain(8, 64))


def test_who_lets_weights_miss_is_told_in_the_report(tmp_path: Path) -> None:
    write_torchao(tmp_path / "model.safetensors", int8_parts("a"), {"a.weight": INT8})
    report = load(Plain(8, 64), tmp_path, strict=Strictness(may_miss=("a.weight",)))
    assert report.missing == ("a.weight",)
    assert any("quantized by torchao" in warning for warning in report.warnings)


def test_inspect_tells_it_and_lists_the_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mlx(tmp_path, {"a": (4, 64)}, {"group_size": 64, "bits": 4})
    app(["inspect", str(tmp_path)], standalone_mode=False)
    out = capsys.readouterr().out
    assert "warning: quantized by MLX: 4-bit groups of 64 (affine) in 1 weight" in out
    assert "a.scales" in out
