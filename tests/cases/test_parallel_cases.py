"""Cases of ranks that share a model: heads, placements, scales of shared experts, progress, bytes, and decisions."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.checkpoints import ar, write_safetensors
from helpers.ranks import Ranks
from helpers.tiny_transformers import saved
from tensorferry import (
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    ReadOptions,
    RuleSet,
    get_model_loader,
    load,
    load_model,
)
from tensorferry.parallel import ColumnParallelLinear, FusedMoE, HeadParallelRMSNorm


def tp(number: int, size: int) -> ParallelConfig:
    return ParallelConfig(tp_size=size, tp_rank=number)


def test_tp_02_the_norm_over_key_value_heads_is_divided_as_these_are(tmp_path: Path) -> None:
    """Two heads of size two for four ranks: neither a norm of half a head, nor the wrong head."""
    write_safetensors(tmp_path / "model.safetensors", {"weight": ar(4)})
    for number, expected in enumerate(([0, 1], [0, 1], [2, 3], [2, 3])):
        norm = HeadParallelRMSNorm(2, 2, parallel=tp(number, 4))
        report = load(norm, tmp_path)
        assert norm.weight.tolist() == expected
        assert report.bytes_needed == 2 * 4


def loaded_by_a_data_parallel_rank(rank: int, size: int, folder: Path) -> list[int]:
    """Load as one of two ranks that each have all of the model: the world says nothing of how it is divided."""
    model = load_model(folder, parallel=ParallelConfig())
    layer = ColumnParallelLinear(4, 6, parallel=ParallelConfig())
    whole = model.get_parameter("model.layers.0.mlp.gate_proj.weight")
    return [*whole.shape, *layer.weight.shape]


def in_pairs(rank: int, size: int, folder: Path) -> Any:
    """Load as one of two data-parallel pairs of tensor-parallel ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = load_model(folder, parallel=tp(rank % 2, 2), group=groups[rank // 2])
    with torch.inference_mode():
        return model(torch.arange(3, 19).reshape(1, 16)).logits


@pytest.mark.transformers
def test_tp_09_ranks_are_what_the_caller_says_and_not_the_world(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    folder = saved("Llama", tmp_path)
    assert two_ranks.run(loaded_by_a_data_parallel_rank, folder) == [[48, 32, 6, 4]] * 2
    expected = load_model(folder)(torch.arange(3, 19).reshape(1, 16)).logits.detach()
    for logits in four_ranks.run(in_pairs, folder):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_moe_07_every_suffix_follows_a_shared_expert_to_its_slot(tmp_path: Path) -> None:
    """Two experts that are chosen, and a shared one after them, with a weight, a bias and scales each."""
    tensors: dict[str, torch.Tensor] = {}
    for n, name in enumerate(("experts.0", "experts.1", "shared_experts")):
        for k, (kind, shape) in enumerate((("gate", (2, 1)), ("up", (2, 1)), ("down", (1, 2)))):
            tensors[f"mlp.{name}.{kind}_proj.weight"] = ar(*shape, start=100 * n + 10 * k)
            tensors[f"mlp.{name}.{kind}_proj.bias"] = ar(shape[0], start=100 * n + 10 * k + 5)
            tensors[f"mlp.{name}.{kind}_proj.weight_scale"] = torch.tensor(0.5 if n == 2 else 1.0 + n)
            tensors[f"mlp.{name}.{kind}_proj.input_scale"] = torch.tensor([n + 0.25 * k])
    write_safetensors(tmp_path / "model.safetensors", tensors)
    layer = FusedMoE(2, 1, 1, 2, shared=1, bias=True)
    for scale in ("weight_scale", "input_scale"):
        layer.declare_stacks(scale, "one", dtype=torch.float32)
    load(layer, tmp_path, rules=RuleSet(*layer.rules("", "mlp.experts.{e}.", shared="mlp.shared_experts.")))
    found = {name: parameter[2].flatten().tolist() for name, parameter in layer.named_parameters()}
    assert found == {
        "w13_weight": [200, 201, 210, 211], "w2_weight": [220, 221], "w13_bias": [205, 206, 215, 216], "w2_bias": [225],
        "w13_weight_scale": [0.5, 0.5], "w2_weight_scale": [0.5], "w13_input_scale": [2, 2.25], "w2_input_scale": [2.5],
    }  # fmt: skip
    assert layer.get_parameter("w13_weight_scale").tolist() == [[1, 1], [2, 2], [0.5, 0.5]]


def test_moe_07_scales_of_other_ranks_experts_are_left_to_them(tmp_path: Path) -> None:
    tensors = {f"{e}.{k}_proj.weight": ar(1, 1) for e in range(4) for k in ("gate", "up", "down")}
    tensors |= {f"{e}.{k}_proj.weight_scale": torch.tensor(float(e)) for e in range(4) for k in ("gate", "up", "down")}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    layer = FusedMoE(4, 1, 1, 1, placement="round_robin", parallel=ParallelConfig(ep_size=2, ep_rank=1))
    layer.declare_stacks("weight_scale", "one")
    report = load(layer, tmp_path, rules=RuleSet(*layer.rules("", "{e}.")))
    assert layer.get_parameter("w2_weight_scale").tolist() == [1, 3]
    assert report.dropped["2.up_proj.weight_scale"] == "not on this rank"
    assert report.bytes_needed == 2 * 3 * 4 * 2


def told(rank: int, size: int, folder: Path) -> tuple[str, str]:
    """Return what a rank writes to standard error while it loads, by either way."""
    written, kept = [], sys.stderr
    loader = get_model_loader(LoadConfig(progress=True, parallel=tp(rank, size), options={}))
    layer = {"gate": ColumnParallelLinear(32, 48, False, parallel=tp(rank, size))}
    works: list[Callable[[], object]] = [
        lambda: load_model(folder / "model", progress=True, parallel=tp(rank, size)),
        lambda: loader.load_model(ModelConfig(str(folder / "gate")), lambda _: torch.nn.ModuleDict(layer)),
    ]
    for work in works:
        sys.stderr = io.StringIO()
        try:
            work()
            written.append(sys.stderr.getvalue())
        finally:
            sys.stderr = kept
    return written[0], written[1]


@pytest.mark.transformers
def test_run_08_one_rank_tells_of_progress(four_ranks: Ranks, tmp_path: Path) -> None:
    saved("Llama", tmp_path / "model")
    (tmp_path / "gate").mkdir()
    write_safetensors(tmp_path / "gate" / "model.safetensors", {"gate.weight": ar(48, 32)})
    first, *others = four_ranks.run(told, tmp_path)
    assert "100%" in first[0]
    assert "100%" in first[1]
    assert others == [("", "")] * 3


def test_run_11_a_rank_of_four_reads_a_quarter(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": torch.zeros(1024, 1024)})
    for number in range(4):
        layer = ColumnParallelLinear(1024, 1024, False, parallel=tp(number, 4))
        report = load(layer, tmp_path)
        assert report.bytes_read == report.bytes_needed == 1024 * 1024 * 4 // 4


def loaded_with(rank: int, size: int, folder: Path, options: list[ReadOptions]) -> float:
    """Load with memory for little in one rank and for much in the other, and compute something together."""
    model = load_model(folder, parallel=tp(rank, size), options=options[rank])
    with torch.inference_mode():
        return float(model(torch.arange(3, 19).reshape(1, 16)).logits.sum())


@pytest.mark.transformers
def test_run_14_ranks_with_different_memory_do_the_same_things_together(two_ranks: Ranks, tmp_path: Path) -> None:
    """One reads everything in one batch, the other in as many as can be: none waits for what the other does not do."""
    folder = saved("Llama", tmp_path)
    little = ReadOptions(max_staging=4096, max_read=4096, max_gap=0, threads=1)
    one, other = two_ranks.run(loaded_with, folder, [ReadOptions(), little])
    assert one == other
