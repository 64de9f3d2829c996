"""What a converter computes beyond moving values is computed by its own code, on whole tensors, while loading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tensorferry
from helpers.tiny_transformers import saved
from tensorferry.compat.transformers import internals

pytestmark = pytest.mark.transformers

UP = "model.layers.{}.mlp.up_proj.weight"


def with_mapping(monkeypatch: pytest.MonkeyPatch, *operations: Any, sources: Sequence[str], target: str) -> None:
    """Let every model have one converter."""
    from transformers.core_model_loading import WeightConverter

    converter = WeightConverter(list(sources), target, operations=list(operations))
    monkeypatch.setattr(internals, "mapping_of", lambda _: [converter])


class Negate:
    """An operation that computes: no symbol can follow it."""

    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], **_: Any) -> dict[str, Any]:
        (tensors,) = input_dict.values()
        return {target_patterns[0]: -(tensors[0] if isinstance(tensors, list) else tensors)}


class Fails(Negate):
    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], **_: Any) -> dict[str, Any]:
        raise RuntimeError("out of luck")


def test_values_that_an_operation_computes_are_computed_by_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    with_mapping(monkeypatch, Negate(), sources=["mlp.up_proj.weight"], target="mlp.up_proj.weight")
    model, report = tensorferry.load_model(tmp_path, return_report=True)
    file = load_file(tmp_path / "model.safetensors")
    for n in (0, 1):
        assert torch.equal(model.get_parameter(UP.format(n)), -file[UP.format(n)])
    assert report.staging_peak > 0


def test_a_failing_operation_is_named_with_the_parameter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    with_mapping(monkeypatch, Fails(), sources=["mlp.up_proj.weight"], target="mlp.up_proj.weight")
    with pytest.raises(tensorferry.FinalizeError, match=r"mlp\.up_proj\.weight: .*Fails.*out of luck") as raised:
        tensorferry.load_model(tmp_path)
    assert raised.value.touched


def test_one_entry_is_split_over_several_parameters_without_staging(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    path = saved("Llama", tmp_path, num_key_value_heads=4) / "model.safetensors"
    tensors, fused = load_file(path), {}
    for n in (0, 1):
        qkv = [tensors.pop(f"model.layers.{n}.self_attn.{x}_proj.weight") for x in "qkv"]
        fused[f"model.layers.{n}.self_attn.qkv.weight"] = torch.cat(qkv)
    save_file({**tensors, **fused}, path, metadata={"format": "pt"})
    parts = [f"self_attn.{x}_proj.weight" for x in "qkv"]
    converter = WeightConverter("self_attn.qkv.weight", parts, operations=[Chunk(dim=0)])
    monkeypatch.setattr(internals, "mapping_of", lambda _: [converter])
    model, report = tensorferry.load_model(tmp_path, return_report=True)
    expected = dict(zip("qkv", fused["model.layers.1.self_attn.qkv.weight"].chunk(3), strict=True))
    for x, values in expected.items():
        assert torch.equal(model.get_parameter(f"model.layers.1.self_attn.{x}_proj.weight"), values)
    assert report.staging_peak == 0


def test_a_shape_that_an_operation_does_not_make_is_a_problem_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers.core_model_loading import Transpose

    saved("Llama", tmp_path)
    with_mapping(monkeypatch, Transpose(0, 1), sources=["mlp.up_proj.weight"], target="mlp.up_proj.weight")
    with pytest.raises(tensorferry.PlanError, match=r"shape: .*up_proj\.weight.*\(32, 48\).*\(48, 32\)"):
        tensorferry.load_model(tmp_path)
