"""Names of Meta and Mistral as rules, which other engines can use, both ways."""

from __future__ import annotations

import pytest
import torch

from helpers.consolidated_models import alternating
from tensorferry.compat.consolidated import has_native_names, naming, rules_for
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import ConfigError
from tensorferry.numerics.compute import compute_whole

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48}
MOE = {**SIZES, "num_local_experts": 3}
NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "layers.7.attention.wq.weight": "model.layers.7.self_attn.q_proj.weight",
    "layers.7.attention.wk.weight": "model.layers.7.self_attn.k_proj.weight",
    "layers.7.attention.wv.weight": "model.layers.7.self_attn.v_proj.weight",
    "layers.7.attention.wo.weight": "model.layers.7.self_attn.o_proj.weight",
    "layers.7.attention_norm.weight": "model.layers.7.input_layernorm.weight",
    "layers.7.ffn_norm.weight": "model.layers.7.post_attention_layernorm.weight",
    "layers.7.feed_forward.w1.weight": "model.layers.7.mlp.gate_proj.weight",
    "layers.7.feed_forward.w2.weight": "model.layers.7.mlp.down_proj.weight",
    "layers.7.feed_forward.w3.weight": "model.layers.7.mlp.up_proj.weight",
}
EXPERTS = {
    "layers.7.feed_forward.gate.weight": "model.layers.7.block_sparse_moe.gate.weight",
    "layers.7.feed_forward.experts.2.w1.weight": "model.layers.7.block_sparse_moe.experts.2.w1.weight",
}


@pytest.mark.parametrize(("sizes", "names"), [(SIZES, NAMES), (MOE, EXPERTS)])
def test_each_name_leads_to_transformers_and_back(sizes: dict[str, int], names: dict[str, str]) -> None:
    there = rules_for(sizes)
    back = there.inverse()
    for name, other in names.items():
        for rules, source, into in ((there, name, other), (back, other, name)):
            route = rules.route(source)
            assert route is not None
            assert [to.into for to in route.to] == [into]


@pytest.mark.parametrize(("leaf", "heads"), [("wq", 4), ("wk", 2)])
def test_rows_of_queries_and_keys_are_put_in_order_and_back(leaf: str, heads: int) -> None:
    halves = torch.arange(heads * 16 * 32.0).reshape(heads * 16, 32)
    name = f"layers.0.attention.{leaf}.weight"
    there, spec = rules_for(SIZES), TensorSpec(DTYPES["F32"], tuple(halves.shape))
    route = there.route(name)
    assert route is not None
    into, _, via, *_ = route.to[0]
    back = there.inverse().route(into)
    assert via is not None
    assert back is not None
    undo = back.to[0].via
    assert undo is not None
    assert torch.equal(compute_whole(via, [alternating(halves, heads)], [spec]), halves)
    assert torch.equal(compute_whole(undo, [halves], [spec]), alternating(halves, heads))


def test_values_and_outputs_keep_their_order() -> None:
    for leaf in ("wv", "wo"):
        route = rules_for(SIZES).route(f"layers.0.attention.{leaf}.weight")
        assert route is not None
        assert route.to[0].via is None


def test_rules_are_made_for_the_names_there_are() -> None:
    rules = rules_for(MOE, ["layers.0.attention.wq.weight", "layers.31.block_sparse_moe.w2", "rope.freqs"]).rules
    assert len(rules) == 2


def test_stacked_experts_are_taken_apart() -> None:
    names = [f"layers.0.block_sparse_moe.{leaf}" for leaf in ("w1", "w2", "w3")]
    route = naming(MOE, names).rules.route("layers.5.block_sparse_moe.w2")
    assert route is not None
    assert [to.into for to in route.to] == [f"model.layers.5.block_sparse_moe.experts.{e}.w2.weight" for e in range(3)]
    via = route.to[1].via
    assert via is not None
    assert via.infer([TensorSpec(DTYPES["F32"], (3 * 48, 32))]).shape == (32, 48)


def test_rotary_frequencies_are_ignorable() -> None:
    route = rules_for(SIZES).route("rope.freqs")
    assert route is not None
    assert route.ignorable is not None


def test_names_of_other_layouts_are_not_taken_for_these() -> None:
    assert not has_native_names(["model.layers.0.self_attn.q_proj.weight", "model.tok_embeddings.weight"])
    assert not has_native_names(["model.layers.0.attention.wqkv.weight"])


@pytest.mark.parametrize("name", ["vision_encoder.ln_pre.weight", "mm_whisper_embeddings.x", "vision_model.y"])
def test_names_of_encoders_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"it belongs to an? (vision|audio) encoder"):
        rules_for(SIZES, ["layers.0.attention.wq.weight", name])


def test_sizes_are_needed() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads"):
        rules_for({"hidden_size": 32})
