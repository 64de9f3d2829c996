"""Planning the ranks of a cluster from headers alone."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

import pytest
import torch

from helpers.command_line import CommandLine
from helpers.tiny_transformers import saved
from tensorferry import ConfigError, ParallelConfig
from tensorferry.compat.transformers import plan_cluster

pytestmark = pytest.mark.transformers

LAYERS, HIDDEN, INNER, KV, VOCAB = 12, 8192, 28672, 1024, 128256
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": VOCAB,
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


def headers_only(folder: Path) -> Path:
    """Write a Llama of 24 GB of which the disk holds nothing but the header: the rest is a hole."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    shapes["model.norm.weight"] = (HIDDEN,)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", KV, HIDDEN), ("self_attn.v_proj", KV, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN), ("mlp.gate_proj", INNER, HIDDEN), ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):  # fmt: skip
            shapes[f"{layer}{name}.weight"] = (rows, columns)
        shapes |= {f"{layer}{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_eight_ranks_of_a_large_model_are_planned_without_its_bytes(tmp_path: Path) -> None:
    planned = plan_cluster(headers_only(tmp_path), ParallelConfig.every_rank(tp_size=8))
    norms = (2 * LAYERS + 1) * HIDDEN * 2
    assert [rank.needed for rank in planned.ranks] == [(planned.whole - norms) // 8 + norms] * 8
    assert planned.whole > 24e9
    assert all(rank.memory == rank.needed for rank in planned.ranks)
    assert 1 < planned.replication < 1.001


def test_stages_and_ranks_share_the_layers(tmp_path: Path) -> None:
    ranks = ParallelConfig.every_rank(tp_size=2, pp_size=4)
    planned = plan_cluster(headers_only(tmp_path), ranks)
    assert [(r.parallel.pp_rank, r.parallel.tp_rank) for r in planned.ranks][:3] == [(0, 0), (0, 1), (1, 0)]
    middle, ends = planned.ranks[2].needed, planned.ranks[0].needed
    assert ends - middle == VOCAB * HIDDEN * 2 // 2
    assert planned.ranks[-1].needed == ends + 2 * HIDDEN


def test_experts_are_dealt_to_ranks(tmp_path: Path) -> None:
    folder = saved("Mixtral", tmp_path)
    planned = plan_cluster(folder, ParallelConfig.every_rank(tp_size=4, ep_size=2))
    assert [r.parallel.ep_rank for r in planned.ranks] == [0, 0, 1, 1]
    assert planned.replication < 1.3
    for rank in planned.ranks:
        dropped = [name for name, why in rank.plan.dropped if why == "not on this rank"]
        assert len(dropped) == 2 * 6 * 3


def test_what_would_not_divide_is_named_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be divided so:") as caught:
        plan_cluster(saved("Llama", tmp_path), ParallelConfig.every_rank(tp_size=3))
    for name in ("q_proj: 4 heads", "o_proj: RowParallelLinear: input size: 32"):
        assert name in str(caught.value)


def test_experts_for_which_there_are_too_many_ranks_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers\.\*\.mlp\.experts: 12 experts cannot be placed on 13 ranks"):
        plan_cluster(saved("Mixtral", tmp_path), ParallelConfig.every_rank(ep_size=13))


def test_the_command_prints_a_row_for_each_rank_or_the_plan_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved("Llama", tmp_path)
    run = CommandLine(capsys)
    table = run("plan", folder, "--tp", "2", "--pp", "2")
    assert table.status == 0
    assert "4 ranks:" in table.out
    data = json.loads(run("plan", folder, "--tp", "2", "--json").out)
    assert [rank["tp_rank"] for rank in data["ranks"]] == [0, 1]
    assert data["ranks"][0]["needed"] < data["whole"]
    plan = json.loads(run("plan", folder, "--tp", "2", "--rank", "1", "--json").out)
    assert plan["fingerprint"] == data["ranks"][1]["fingerprint"]
    one = run("plan", folder, "--tp", "2", "--rank", "1")
    assert "part [16, 32]" in one.out
    wrong = run("plan", folder, "--tp", "2", "--rank", "2")
    assert wrong.status == 2
    assert "from 0 to 1" in wrong.err


def test_the_plan_of_a_rank_is_what_a_rank_loads(tmp_path: Path) -> None:
    folder = saved("Llama", tmp_path, dtype=torch.bfloat16)
    ranks = ParallelConfig.every_rank(tp_size=2)
    planned = plan_cluster(folder, ranks)
    assert planned.ranks[0].plan.fingerprint != planned.ranks[1].plan.fingerprint
    assert planned.ranks[1].plan.fingerprint == plan_cluster(folder, ranks[1:]).ranks[0].plan.fingerprint
