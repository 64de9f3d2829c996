"""NVFP4 weights of GGUF files, and the factors that llama.cpp's converter writes beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import tensorferry
from helpers.gguf_models import checkpoint_of, interleaved, metadata_of, stacked, translated, write_gguf
from helpers.tiny_transformers import equal_bits, tiny
from tensorferry.compat.gguf.factors import with_factors
from tensorferry.core.transforms import Dequantize

pytestmark = pytest.mark.transformers

NVFP4 = gguf.GGMLQuantizationType.NVFP4
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
MOE = {"expert_count": 12, "expert_used_count": 2, "expert_feed_forward_length": 64, "attention.key_length": 8}

Packed = tuple[np.ndarray, torch.Tensor]


def blocks(shape: tuple[int, ...], seed: int) -> Packed:
    """Return random NVFP4 blocks for `shape`, and the numbers that gguf-py makes of them."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // 64, 36), dtype=np.uint8)
    raw[..., :4] = rng.integers(0x20, 0x48, raw[..., :4].shape)
    raw = raw.reshape(*shape[:-1], -1)
    return raw, torch.from_numpy(gguf.quants.dequantize(raw, NVFP4).reshape(shape).copy())


def write_packed(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Write a file of float tensors and `Packed` ones."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        kind = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
        writer.add_key_value(key, value, kind[type(value)])
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=NVFP4)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed_layers(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors with every matrix of a layer packed whose rows are whole blocks."""
    matrices = [n for n, t in tensors.items() if n.startswith("blk.") and t.dim() > 1 and not t.shape[-1] % 64]
    return {n: blocks(tuple(t.shape), seed) if n in matrices else t for seed, (n, t) in enumerate(tensors.items())}


def factors_for(tensors: Mapping[str, Any], *, skip: str = "") -> dict[str, torch.Tensor]:
    """Return a factor for each packed tensor but `skip`, one for each expert of a stack, none of them round."""
    found = {}
    for number, (name, tensor) in enumerate(t for t in tensors.items() if isinstance(t[1], tuple) and t[0] != skip):
        count = tensor[1].shape[0] if tensor[1].dim() == 3 else 1
        found[name.replace(".weight", ".scale")] = torch.linspace(0.3, 0.7, count) + number / 7
    return found


def product(tensors: Mapping[str, Any], factors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the numbers of all tensors, in float32."""
    out = {}
    for name, tensor in tensors.items():
        numbers = tensor[1] if isinstance(tensor, tuple) else tensor
        factor = factors.get(name.replace(".weight", ".scale"), torch.ones(1))
        out[name] = numbers * factor.view(-1, *(1 for _ in numbers.shape[1:]))
    return out


def llama(folder: Path, *, skip: str = "") -> tuple[Path, Path]:
    """Write a packed llama with factors, and the same as float32 numbers."""
    model = tiny("Llama", **SIZES)
    tensors = packed_layers(interleaved(translated(checkpoint_of(model, folder)), 4, 2))
    factors, metadata = factors_for(tensors, skip=skip), metadata_of("llama", model.config)
    inputs = {name.replace(".scale", ".input_scale"): torch.full((1,), 2.0) for name in factors}
    plain = write_gguf(folder / "plain.gguf", "llama", metadata, product(tensors, factors))
    return write_packed(folder / "m.gguf", "llama", metadata, {**tensors, **factors, **inputs}), plain


def assert_same(file: Path, plain: Path, dtype: str = "float32") -> tensorferry.Report:
    ours, report = tensorferry.load_model(file, dtype=dtype, return_report=True)
    expected = tensorferry.load_model(plain, dtype=dtype).state_dict()
    state = ours.state_dict()
    assert [name for name in expected if not equal_bits(state[name], expected[name])] == []
    return report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_factor_is_multiplied_in_in_float32_and_the_product_rounded_once(dtype: str, tmp_path: Path) -> None:
    assert_same(*llama(tmp_path), dtype)


def test_factors_of_activations_are_dropped_and_the_report_says_why(tmp_path: Path) -> None:
    report = assert_same(*llama(tmp_path))
    reasons = {name: why for name, why in report.dropped.items() if name.endswith(".input_scale")}
    assert set(reasons.values()) == {"a factor of activations, for products with activations of four bits"}
    assert len(reasons) == 14


def test_a_weight_without_a_factor_is_what_its_blocks_say(tmp_path: Path) -> None:
    assert_same(*llama(tmp_path, skip="blk.1.ffn_up.weight"))


@pytest.mark.parametrize("fused", [False, True])
def test_each_expert_of_a_stack_has_a_factor_of_its_own(fused: bool, tmp_path: Path) -> None:
    model = tiny("Qwen3-MoE", hidden_size=64, moe_intermediate_size=64)
    tensors = packed_layers(stacked(translated(checkpoint_of(model, tmp_path)), fused=fused))
    factors, metadata = factors_for(tensors), metadata_of("qwen3moe", model.config, expert_weights_norm=False, **MOE)
    plain = write_gguf(tmp_path / "plain.gguf", "qwen3moe", metadata, product(tensors, factors))
    assert_same(write_packed(tmp_path / "m.gguf", "qwen3moe", metadata, {**tensors, **factors}), plain)


def test_a_factor_that_does_not_fit_its_weight_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", {}, {"a.weight": torch.ones(2, 3), "a.scale": torch.ones(5)})
    with (
        tensorferry.open_checkpoint(file) as checkpoint,
        pytest.raises(tensorferry.RuleError, match=r"a\.scale is no factor of a\.weight: scale takes one factor, or"),
    ):
        with_factors(checkpoint.catalogue)


def test_a_plan_says_of_a_product_what_it_reads(tmp_path: Path) -> None:
    file, _ = llama(tmp_path)
    with tensorferry.open_checkpoint(file) as checkpoint:
        entry = with_factors(checkpoint.catalogue)["blk.0.ffn_up.weight"]
    assert (entry.dtype.name, entry.shape) == ("F32", (128, 64))
    assert [one.name for one in entry.lying] == ["blk.0.ffn_up.weight", "blk.0.ffn_up.scale"]


def test_blocks_without_their_factor_are_a_problem_for_rules_that_forget_it(tmp_path: Path) -> None:
    file = write_packed(tmp_path / "m.gguf", "llama", {}, {"w.weight": blocks((2, 64), 0), "w.scale": torch.ones(1)})
    model = torch.nn.ModuleDict({"w": torch.nn.Linear(64, 2, bias=False)})
    plan = tensorferry.plan(model, file)
    assert isinstance(plan.steps[0].via, Dequantize)
    with pytest.raises(tensorferry.PlanError, match=r"its numbers are to be multiplied by w\.scale"):
        tensorferry.load(model, file)
