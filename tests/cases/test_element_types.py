"""Reported failures with element types: scalars, 8-bit floats, unsigned and complex numbers, overflow, islands."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.checkpoints import ar, write_raw_safetensors, write_safetensors
from tensorferry import FinalizeError, FormatError, Strictness, load, open_checkpoint


def _read(path: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as checkpoint:
        return dict(checkpoint.tensors())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtype_01_a_scalar_is_read_and_loaded(tmp_path: Path, device: str) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"s": torch.tensor(2.5)})
    assert (_read(tmp_path)["s"].shape, _read(tmp_path)["s"].item()) == ((), 2.5)
    model = nn.ParameterDict({"s": nn.Parameter(torch.zeros((), device=device))})
    load(model, tmp_path)
    assert (model["s"].shape, model["s"].item()) == ((), 2.5)


def test_dtype_01_a_scalar_and_a_vector_of_one_stand_for_each_other(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"s": torch.tensor(2.5), "t": torch.tensor([3.5])})
    model = nn.ParameterDict({"s": nn.Parameter(torch.zeros(1)), "t": nn.Parameter(torch.zeros(()))})
    load(model, tmp_path)
    assert (model["s"].tolist(), model["t"].item()) == ([2.5], 3.5)


def test_dtype_04_eight_bit_floats_keep_their_type(tmp_path: Path) -> None:
    entries = [("a", "F8_E4M3", (2,), bytes([0x38, 0x40])), ("b", "F8_E5M2", (2,), bytes([0x3C, 0x40]))]
    write_raw_safetensors(tmp_path / "model.safetensors", entries)
    found = _read(tmp_path)
    assert (found["a"].dtype, found["b"].dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert found["a"].float().tolist() == found["b"].float().tolist() == [1, 2]
    model: Any = nn.Module()
    model.register_buffer("a", torch.zeros(2).to(torch.float8_e4m3fn))
    model.register_buffer("b", torch.zeros(2, device="meta").to(torch.float8_e5m2))
    load(model, tmp_path)
    assert model.a.float().tolist() == model.b.float().tolist() == [1, 2]


def test_dtype_04_an_unknown_type_is_refused_with_its_name(tmp_path: Path) -> None:
    write_raw_safetensors(tmp_path / "model.safetensors", [("a", "F8_E9M9", (2,), b"\0\0")])
    with pytest.raises(FormatError, match="F8_E9M9"):
        open_checkpoint(tmp_path)


def test_dtype_05_unsigned_bool_and_complex_numbers_keep_type_and_value(tmp_path: Path) -> None:
    tensors = {
        "a": torch.tensor([65535], dtype=torch.uint16),
        "b": torch.tensor([4294967295], dtype=torch.uint32),
        "c": torch.tensor([True, False]),
        "d": torch.tensor([1 + 2j]),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    write_raw_safetensors(tmp_path / "u64.safetensors", [("e", "U64", (1,), b"\xff" * 8)])
    tensors["e"] = torch.tensor([2**64 - 1], dtype=torch.uint64)
    found = _read(tmp_path / "model.safetensors") | _read(tmp_path / "u64.safetensors")
    assert {n: (t.dtype, t.tolist()) for n, t in found.items()} == {
        n: (t.dtype, t.tolist()) for n, t in tensors.items()
    }


OVERFLOWING = torch.tensor([1, 1e5, -1e30, 1e-30], dtype=torch.bfloat16)


def _half(folder: Path) -> nn.ParameterDict:
    write_safetensors(folder / "model.safetensors", {"w": OVERFLOWING})
    return nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, dtype=torch.float16))})


def test_dtype_06_values_that_overflow_are_refused_with_their_tensor_and_count(tmp_path: Path) -> None:
    with pytest.raises(FinalizeError, match="w: 2 overflow, 1 underflow"):
        load(_half(tmp_path), tmp_path)


def test_dtype_06_or_loaded_with_a_warning_where_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _half(tmp_path)
    with caplog.at_level(logging.WARNING):
        report = load(model, tmp_path, strict=Strictness(lossy="warn"))
    assert model["w"].tolist() == [1, float("inf"), float("-inf"), 0]
    assert report.losses == {"w": (2, 1)}
    assert "w: 2 overflow, 1 underflow" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtype_08_float32_parts_of_a_bfloat16_model_are_not_rounded(tmp_path: Path, device: str) -> None:
    sinks = torch.tensor([1 + 2**-20])
    write_safetensors(tmp_path / "model.safetensors", {"sinks": sinks, "w": ar(2, 2)})
    model = nn.ParameterDict(
        {
            "sinks": nn.Parameter(torch.zeros(1, device=device)),
            "w": nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16, device=device)),
        }
    )
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        report = load(model, tmp_path)
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(model["sinks"], sinks)
    assert model["w"].dtype == torch.bfloat16
    assert report.casts == {"F32 -> BF16": 1}


def test_dtype_12_a_torch_without_a_type_loads_everything_that_does_not_need_it(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"w": ar(2)})
    write_raw_safetensors(tmp_path / "u64.safetensors", [("w", "U64", (1,), b"\xff" * 8)])
    code = (
        "import sys, torch; del torch.uint64, torch.float4_e2m1fn_x2\n"
        "import tensorferry, tensorferry.errors\n"
        "m = torch.nn.ParameterDict({'w': torch.nn.Parameter(torch.zeros(2))})\n"
        "tensorferry.load(m, sys.argv[1] + '/model.safetensors'); assert m['w'].tolist() == [0, 1]\n"
        "try: tensorferry.open_checkpoint(sys.argv[1] + '/u64.safetensors').read('w')\n"
        "except tensorferry.errors.UnsupportedDtype as error: assert 'torch.uint64' in str(error)\n"
        "else: raise SystemExit('read without its type')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
