"""Models that are divided among ranks answer as the whole one does, and every rank reads its own part of the files."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.ranks import Ranks
from helpers.tiny_transformers import saved
from helpers.weights import variant
from tensorferry import ParallelConfig, ReadOptions, load_model
from tensorferry.execute import in_strips, strips
from tensorferry.execute.exchange import rows
from tensorferry.execute.exchange.links import neighbourhood
from tensorferry.execute.ways import Ways

pytestmark = pytest.mark.transformers

IDS = torch.arange(3, 19).reshape(1, 16)
EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "llama.py"


def parallel(rank: int, size: int, tp: int, ep: int) -> ParallelConfig:
    return ParallelConfig(tp_size=tp, tp_rank=rank if tp > 1 else 0, ep_size=ep, ep_rank=rank * ep // size)


def logits_and_bytes(rank: int, size: int, folder: Path, tp: int, ep: int) -> tuple[torch.Tensor, int]:
    config = parallel(rank, size, tp, ep)
    model, report = load_model(folder, parallel=config, return_report=True)
    with torch.inference_mode():
        return model(IDS).logits, report.bytes_needed


def assert_near(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow what another order of sums makes of float32, over thirty layers at most."""
    assert float((logits - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def check(ranks: Ranks, folder: Path, tp: int, ep: int) -> list[float]:
    """Compare the logits of all ranks with the whole model's; return which share of its bytes each rank needed."""
    whole, report = load_model(folder, return_report=True)
    with torch.inference_mode():
        expected = whole(IDS).logits
    found = ranks.run(logits_and_bytes, folder, tp, ep)
    for logits, _ in found:
        assert_near(logits, expected)
    return [needed / report.bytes_needed for _, needed in found]


TENSOR_PARALLEL = ["Llama", "tied Llama", "Qwen2", "Gemma2", "Phi3", "Mixtral", "Qwen3-MoE", "DeepSeek-V3"]


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_two_tensor_parallel_ranks(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    shares = check(two_ranks, saved(name, tmp_path), 2, 1)
    assert max(shares) < (0.75 if name == "DeepSeek-V3" else 0.55)  # its plan leaves attention whole


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_four_tensor_parallel_ranks_share_key_value_heads_where_there_are_fewer(
    name: str, four_ranks: Ranks, tmp_path: Path
) -> None:
    shares = check(four_ranks, saved(name, tmp_path), 4, 1)
    assert max(shares) < (0.62 if name == "DeepSeek-V3" else 0.36)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "GPT-OSS", "DeepSeek-V3"])
def test_experts_are_divided_by_number(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    check(two_ranks, saved(name, tmp_path), 1, 2)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_tensor_and_expert_parallelism_go_together(name: str, four_ranks: Ranks, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    check(four_ranks, folder, 4, 2)
    check(four_ranks, folder, 4, 4)


def read_together(rank: int, size: int, folder: Path) -> tuple[torch.Tensor, int]:
    """Load from a cold disk, as it were, where even a few rows are worth handing on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ways, "find_cached", lambda self, reads: False)
        patch.setattr(rows, "LEAST", 64)
        patch.setattr(in_strips, "LEAST", 64)
        patch.setattr(strips, "_PART", 16)
        model, report = load_model(folder, parallel=parallel(rank, size, size, 1), return_report=True)
    with torch.inference_mode():
        return model(IDS).logits, report.ways.get("from another rank", 0)


def test_a_rank_that_can_ask_no_other_reads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ways, "find_cached", lambda self, reads: False)
    monkeypatch.setattr(rows, "LEAST", 64)
    folder = saved("Llama", tmp_path)
    for options in (ReadOptions(), ReadOptions(shared=True)):
        _, report = load_model(folder, parallel=parallel(1, 2, 2, 1), options=options, return_report=True)
        assert "from another rank" not in report.ways


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_ranks_that_read_for_each_other_answer_the_same(name: str, four_ranks: Ranks, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    alone = four_ranks.run(logits_and_bytes, folder, 4, 1)
    found = four_ranks.run(read_together, folder)
    for (expected, _), (logits, handed_on) in zip(alone, found, strict=True):
        assert torch.equal(logits, expected)
        assert handed_on or not neighbourhood()


@pytest.mark.weights
def test_smollm2_on_three_ranks(three_ranks: Ranks) -> None:
    shares = check(three_ranks, variant("f32"), 3, 1)
    assert max(shares) < 0.34


def native_logits(rank: int, size: int, folder: Path, ep: int) -> torch.Tensor:
    example: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    config = ParallelConfig(tp_size=size, tp_rank=rank, ep_size=ep, ep_rank=rank * ep // size)
    with torch.inference_mode():
        logits: torch.Tensor = example["load_llama"](folder, config)(IDS)
    return logits


@pytest.mark.parametrize("name", ["Llama", "tied Llama", "Qwen2", "Mixtral"])
def test_the_native_decoder_answers_as_transformers_does(
    name: str, two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path)
    with torch.inference_mode():
        expected = load_model(folder)(IDS).logits
    layouts = [(two_ranks, 1), (four_ranks, 1), *([(two_ranks, 2), (four_ranks, 2)] if name == "Mixtral" else [])]
    for ranks, ep in layouts:
        for logits in ranks.run(native_logits, folder, ep):
            assert_near(logits, expected)


@pytest.mark.weights
def test_the_native_decoder_loads_smollm2_on_three_ranks(three_ranks: Ranks) -> None:
    folder = variant("bf16")
    with torch.inference_mode():
        expected = load_model(folder, dtype=torch.float32)(IDS).logits
    for logits in three_ranks.run(native_logits, folder, 1):
        assert_near(logits, expected)


def test_a_class_without_a_plan_is_refused_or_replicated(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = saved("GPT-2", tmp_path)
    for fault in two_ranks.tried(logits_and_bytes, folder, 2, 1):
        assert fault.kind == "ConfigError"
        assert "GPT2LMHeadModel has no tensor-parallel plan" in fault.words
    for logits in two_ranks.run(replicated_logits, folder):
        torch.testing.assert_close(logits, load_model(folder)(IDS).logits.detach())


def replicated_logits(rank: int, size: int, folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        model = load_model(folder, parallel=parallel(rank, size, size, 1), replicated=True)
        logits: torch.Tensor = model(IDS).logits
    return logits


def test_everything_that_cannot_be_divided_is_named_at_once(tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path, num_attention_heads=3, num_key_value_heads=1, hidden_size=30, head_dim=10)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_attention_heads"] == 3
    with pytest.raises(ValueError, match=r"layers\.\*\.self_attn\.q_proj: 3 heads cannot be divided among 2 ranks"):
        load_model(folder, parallel=ParallelConfig(tp_size=2))
