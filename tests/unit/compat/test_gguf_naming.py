"""The names of GGUF as rules: where each goes, what is undone, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.core_values import catalogue_of
from tensorferry.compat.gguf import architecture_of, naming
from tensorferry.compat.gguf.architectures import ARCHITECTURES
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.ruleset import Destination
from tensorferry.core.transforms import Add, Chain, Permute, Take, Transpose
from tensorferry.errors import ConfigError

LLAMA: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {**LLAMA, "num_experts": 3, "moe_intermediate_size": 16}
LATENT = {**LLAMA, "kv_lora_rank": 6, "qk_nope_head_dim": 3, "v_head_dim": 5, "n_routed_experts": 2}


def sent(architecture: str, config: dict[str, Any], name: str, *others: str) -> tuple[Destination, ...]:
    route = naming(architecture, config, [name, *others]).rules.route(name)
    return route.to if route is not None else ()


def test_names_outside_of_layers_are_the_same_everywhere() -> None:
    for architecture in ARCHITECTURES:
        rules = naming(architecture, LLAMA).rules
        said = rules.explain(["token_embd.weight", "output.weight"])
        assert said == [
            "token_embd.weight -> model.embed_tokens.weight",
            "output.weight -> lm_head.weight",
        ], architecture


def test_rows_of_queries_and_keys_are_permuted_by_their_own_number_of_heads() -> None:
    (query,) = sent("llama", LLAMA, "blk.3.attn_q.weight")
    (key,) = sent("llama", LLAMA, "blk.3.attn_k.bias")
    assert query == Destination("model.layers.3.self_attn.q_proj.weight", "", Permute((4, 4, 2, 32), (0, 2, 1, 3)))
    assert key == Destination("model.layers.3.self_attn.k_proj.bias", "", Permute((2, 4, 2), (0, 2, 1)))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma", "phi3", "gpt-oss", "deepseek2"])
def test_other_architectures_have_rows_in_order(architecture: str) -> None:
    assert not any(isinstance(getattr(rule, "via", None), Permute) for rule in naming(architecture, LLAMA).rules.rules)


def test_gemmas_norms_lose_the_one_that_was_added() -> None:
    assert sent("gemma", LLAMA, "output_norm.weight") == (Destination("model.norm.weight", "", Add(-1.0)),)
    (norm,) = sent("gemma3", LLAMA, "blk.0.attn_q_norm.weight")
    assert norm == Destination("model.layers.0.self_attn.q_norm.weight", "", Add(-1.0))
    assert sent("qwen3", LLAMA, "blk.0.attn_q_norm.weight")[0].via is None


def test_the_four_norms_of_gemma_2_are_told_apart() -> None:
    rules = naming("gemma2", LLAMA).rules
    names = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    found = [rules.route(f"blk.0.{name}.weight") for name in names]
    assert [route.to[0].into.split(".")[3] for route in found if route is not None] == [
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ]  # fmt: skip


def test_a_stack_of_experts_is_one_tensor_for_each() -> None:
    down = sent("qwen3moe", MOE, "blk.1.ffn_down_exps.weight")
    assert [d.into for d in down] == [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in range(3)]
    assert down[2].via == Take(Region((3, 32, 16), Box((2, 0, 0), (3, 32, 16))), (32, 16))


def test_gate_and_up_of_experts_in_one_tensor_are_its_halves() -> None:
    both = sent("qwen3moe", MOE, "blk.0.ffn_gate_up_exps.weight")
    assert len(both) == 6
    assert both[3].into == "model.layers.0.mlp.experts.0.up_proj.weight"
    assert both[3].via == Take(Region((3, 32, 32), Box((0, 16, 0), (1, 32, 32))), (16, 32))


def test_old_files_hold_experts_one_by_one() -> None:
    (up,) = sent("llama", {**LLAMA, "num_local_experts": 3}, "blk.0.ffn_up.2.weight")
    assert up == Destination("model.layers.0.block_sparse_moe.experts.2.w3.weight", "", None)


def test_queries_keys_and_values_in_one_tensor_are_rows_of_it() -> None:
    query, key, value = sent("llama", LLAMA, "blk.0.attn_qkv.weight")
    rows = Take(Region((64, 32), Box((32, 0), (48, 32))), (16, 32))
    assert key.via == Chain((rows, Permute((2, 4, 2, 32), (0, 2, 1, 3))))
    assert value == Destination(
        "model.layers.0.self_attn.v_proj.weight", "", Take(Region((64, 32), Box((48, 0), (64, 32))), (16, 32))
    )
    assert query.into.endswith("q_proj.weight")


def test_phi_3_has_them_in_one_tensor_too() -> None:
    assert sent("phi3", LLAMA, "blk.0.attn_qkv.weight") == (
        Destination("model.layers.0.self_attn.qkv_proj.weight", "", None),
    )


def test_latent_keys_are_transposed_into_their_part_of_each_head() -> None:
    names = ("blk.2.attn_k_b.weight", "blk.2.attn_v_b.weight")
    found = naming("deepseek2", LATENT, names)
    into = "model.layers.2.self_attn.kv_b_proj.weight"
    assert sent("deepseek2", LATENT, *names) == (Destination(into, "k", Transpose((0, 2, 1))),)
    slots = found.slots_of(into)
    assert slots["k"].local == Region((4, 8, 6), Box((0, 0, 0), (4, 3, 6)))
    assert slots["v"].local == Region((4, 8, 6), Box((0, 3, 0), (4, 8, 6)))


def test_latent_keys_and_values_in_one_tensor_need_no_slots() -> None:
    found = naming("deepseek2", LATENT, ["blk.0.attn_kv_b.weight"])
    assert found.slots_of("model.layers.0.self_attn.kv_b_proj.weight") == {}


def test_gate_and_up_of_gpt_oss_alternate() -> None:
    config = {**LLAMA, "num_local_experts": 2, "intermediate_size": 8}
    slots = naming("gpt-oss", config).slots_of("model.layers.5.mlp.experts.gate_up_proj")
    assert slots["up"].local == Region((2, 32, 8, 2), Box((0, 0, 0, 1), (2, 32, 8, 2)))
    assert slots["up"].logical == (2, 32, 8)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_long.weight", "blk.7.attn_rot_embd.weight"])
def test_rotary_tables_are_no_tensors_of_the_model(name: str) -> None:
    route = naming("llama", LLAMA, [name]).rules.route(name)
    assert route is not None
    assert route.ignorable


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "phi3"])
def test_the_way_back_leads_to_the_names_of_gguf(architecture: str) -> None:
    there = naming(architecture, LLAMA).rules
    back = there.inverse()
    for stem in ARCHITECTURES[architecture].blocks:
        name = f"blk.11.{stem}.weight"
        route = there.route(name)
        assert route is not None
        returned = back.route(route.to[0].into)
        assert returned is not None
        assert returned.to[0].into == name


def test_the_way_back_undoes_the_permutation() -> None:
    route = naming("llama", LLAMA).rules.inverse().route("model.layers.0.self_attn.k_proj.weight")
    assert route is not None
    assert route.to[0].via == Permute((2, 2, 4, 32), (0, 2, 1, 3))


def test_an_unknown_architecture_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'mamba'.*llama, qwen2"):
        naming("mamba", LLAMA)


def test_a_configuration_without_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match="no hidden_size"):
        naming("llama", {"num_attention_heads": 4})


def test_only_gguf_files_with_names_of_gguf_have_an_architecture() -> None:
    entries = list(catalogue_of({"token_embd.weight": (4, 4)}).values())
    metadata = {"general.architecture": "qwen2"}
    assert architecture_of(Catalogue(entries, format="gguf", metadata=metadata)) == "qwen2"
    assert architecture_of(Catalogue(entries, format="safetensors", metadata=metadata)) is None
    renamed = list(catalogue_of({"model.embed_tokens.weight": (4, 4)}).values())
    assert architecture_of(Catalogue(renamed, format="gguf", metadata=metadata)) is None
