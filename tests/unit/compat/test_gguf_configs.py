"""Configurations out of GGUF metadata: what is read, what follows, and what is assumed."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.core_values import catalogue_of
from tensorferry.compat.gguf import infer_config
from tensorferry.compat.translation import InferredConfig
from tensorferry.compat.translation.llama3_rope import divisors_of, llama3_parameters
from tensorferry.core.boxes import Shape
from tensorferry.errors import ConfigError, CorruptFile
from tensorferry.formats.gguf_metadata import GgufMetadata, Value, ValueType

SIZES: dict[str, Any] = {
    "block_count": 2, "embedding_length": 32, "feed_forward_length": 48, "context_length": 64,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip
TENSORS: dict[str, Shape] = {
    "token_embd.weight": (96, 32),
    "blk.0.attn_norm.weight": (32,),
    "blk.1.attn_norm.weight": (32,),
}
MOE = {**SIZES, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
LATENT = {
    **MOE, "attention.kv_lora_rank": 16, "rope.dimension_count": 8, "attention.key_length": 24,
    "attention.value_length": 16, "attention.key_length_mla": 20, "attention.value_length_mla": 12,
}  # fmt: skip


def value(given: Any) -> Value:
    kinds = {bool: ValueType.BOOL, int: ValueType.U32, float: ValueType.F64, str: ValueType.STRING}
    if isinstance(given, list):
        return Value(ValueType.ARRAY, given, kinds[type(given[0])])
    return Value(kinds[type(given)], given)


def made(
    architecture: str, keys: dict[str, Any], tensors: dict[str, Shape] | None = None, **values: list[float]
) -> InferredConfig:
    full = {"general.architecture": architecture}
    full |= {key if "." in key and key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}": v
             for key, v in keys.items()}  # fmt: skip
    metadata = GgufMetadata({key: value(v) for key, v in full.items()}, what="m.gguf")
    small = {f"{name}.weight": found for name, found in values.items()}
    return infer_config(metadata, catalogue_of({**TENSORS, **(tensors or {})}), small)


def test_what_the_file_says_is_read() -> None:
    found = made("llama", {**SIZES, "rope.freq_base": 5e5, "tokenizer.ggml.eos_token_id": 2})
    assert found.config["num_hidden_layers"] == 2
    assert found.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}
    assert found.config["eos_token_id"] == 2
    assert {"num_hidden_layers", "rms_norm_eps", "rope_parameters", "eos_token_id"} <= set(found.of("read"))


def test_what_follows_from_tensors_is_inferred() -> None:
    found = made("llama", SIZES, {"blk.0.attn_q.bias": (32,)})
    assert found.config["vocab_size"] == 96
    assert found.config["head_dim"] == 8
    assert (found.config["tie_word_embeddings"], found.config["attention_bias"]) == (True, True)
    assert {"vocab_size", "head_dim", "tie_word_embeddings", "attention_bias"} <= set(found.of("inferred"))


def test_an_output_tensor_means_that_the_head_is_not_tied() -> None:
    assert made("llama", SIZES, {"output.weight": (96, 32)}).config["tie_word_embeddings"] is False


def test_what_the_file_cannot_say_is_assumed_and_told() -> None:
    found = made("llama", SIZES)
    assert {"hidden_act", "rope_parameters", "bos_token_id"} <= set(found.of("assumed"))
    assert any("hidden_act = 'silu'" in note and "assumed" in note for note in found.notes)


def test_a_token_outside_of_the_vocabulary_is_none() -> None:
    assert made("phi3", {**SIZES, "tokenizer.ggml.padding_token_id": 32000}).config["pad_token_id"] is None


@pytest.mark.parametrize(
    ("keys", "kind", "window"),
    [
        ({"general.name": "Mistral 7B Instruct v0.1"}, "mistral", 4096),
        ({"general.name": "Mistral 7B Instruct v0.3"}, "mistral", None),
        ({"attention.sliding_window": 1024}, "mistral", 1024),
        ({"general.name": "Llama 3"}, "llama", "absent"),
    ],
)
def test_mistral_is_told_by_its_name_or_its_window(keys: dict[str, Any], kind: str, window: Any) -> None:
    config = made("llama", {**SIZES, **keys}).config
    assert (config["model_type"], config.get("sliding_window", "absent")) == (kind, window)


def test_mixtral_is_told_by_its_experts() -> None:
    config = made("llama", {**SIZES, "expert_count": 8, "expert_used_count": 2}).config
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)


def test_qwen_3_has_the_head_size_that_the_file_says() -> None:
    assert made("qwen3", {**SIZES, "attention.key_length": 128}).config["head_dim"] == 128


def test_qwen_3_moe_has_the_expert_size_that_the_file_says_or_its_tensors_have() -> None:
    assert made("qwen3moe", MOE).config["moe_intermediate_size"] == 16
    without = {key: v for key, v in MOE.items() if key != "expert_feed_forward_length"}
    found = made("qwen3moe", without, {"blk.1.ffn_down_exps.weight": (4, 32, 24)})
    assert found.config["moe_intermediate_size"] == 24
    assert found.origin["moe_intermediate_size"] == "inferred"


def test_layers_without_a_router_are_dense() -> None:
    config = made("qwen3moe", MOE, {"blk.1.ffn_gate_inp.weight": (4, 32)}).config
    assert config["mlp_only_layers"] == [0]


def test_gemma_3_looks_at_a_window_in_all_but_every_sixth_layer() -> None:
    layers: dict[str, Shape] = {f"blk.{n}.attn_norm.weight": (32,) for n in range(7)}
    config = made("gemma3", {**SIZES, "block_count": 7}, layers).config
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_a_file_that_lists_its_windows_is_believed() -> None:
    found = made("gemma2", {**SIZES, "attention.sliding_window_pattern": [False, True]})
    assert found.config["layer_types"] == ["full_attention", "sliding_attention"]
    assert found.origin["layer_types"] == "read"


def test_deepseek_has_its_heads_from_the_lengths_of_unfolded_keys() -> None:
    config = made("deepseek2", LATENT, {"blk.1.exp_probs_b.bias": (4,)}).config
    assert (config["qk_nope_head_dim"], config["v_head_dim"], config["num_key_value_heads"]) == (12, 12, 4)
    assert config["model_type"] == "deepseek_v3"


def test_deepseek_2_and_old_files_of_it() -> None:
    old = {key: v for key, v in LATENT.items() if not key.endswith("_mla")}
    config = made("deepseek2", old).config
    assert (config["model_type"], config["qk_nope_head_dim"], config["v_head_dim"]) == ("deepseek_v2", 16, 16)


def test_yarn_of_gpt_oss_is_read_and_its_usual_parameters_are_assumed() -> None:
    keys = {
        **MOE, "rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }  # fmt: skip
    found = made("gpt-oss", keys)
    assert found.config["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    }  # fmt: skip
    assert found.config["intermediate_size"] == 16


def test_phi_3_has_its_factors_from_tensors_and_no_window_where_it_is_zero() -> None:
    keys = {
        **SIZES,
        "attention.sliding_window": 0,
        "rope.scaling.original_context_length": 16,
        "rope.dimension_count": 4,
    }
    config = made("phi3", keys, rope_factors_long=[2.0, 4.0], rope_factors_short=[1.0, 1.5]).config
    rope = config["rope_parameters"]
    assert (rope["rope_type"], rope["long_factor"], rope["short_factor"]) == ("longrope", [2.0, 4.0], [1.0, 1.5])
    assert (rope["partial_rotary_factor"], config["sliding_window"]) == (0.5, None)


def test_the_scaling_of_llama_3_is_found_from_its_table() -> None:
    expected = llama3_parameters(factor=32.0, original=8192)
    table = divisors_of(expected, 5e5, 64)
    keys = {**SIZES, "rope.freq_base": 5e5, "context_length": 131072, "attention.key_length": 128}
    found = made("llama", keys, rope_freqs=table)
    assert found.config["rope_parameters"] == {"rope_theta": 5e5, **expected}
    assert found.origin["rope_parameters"] == "inferred"


def test_short_waves_stay_and_long_ones_are_divided() -> None:
    """Waves of up to 8192 / 4 positions stay as they are, those of 8192 and more are divided by 32."""
    table = divisors_of(llama3_parameters(factor=32.0, original=8192), 5e5, 32)
    assert table[:14] == [1.0] * 14
    assert table[18:] == pytest.approx([32.0] * 14)
    assert table == sorted(table)


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "context_length"])
def test_a_size_that_is_absent_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"llama\.{key}"):
        made("llama", {k: v for k, v in SIZES.items() if k != key})


def test_a_size_of_a_wrong_type_is_named() -> None:
    with pytest.raises(CorruptFile, match=r"llama\.embedding_length must be an integer"):
        made("llama", {**SIZES, "embedding_length": "32"})


def test_head_counts_that_differ_by_layer_are_refused_and_equal_ones_are_taken() -> None:
    assert made("llama", {**SIZES, "attention.head_count_kv": [2, 2]}).config["num_key_value_heads"] == 2
    with pytest.raises(ConfigError, match="differs from layer to layer"):
        made("llama", {**SIZES, "attention.head_count_kv": [2, 1]})


@pytest.mark.parametrize("key", ["embedding_length", "attention.head_count", "block_count"])
def test_sizes_of_nothing_are_refused(key: str) -> None:
    with pytest.raises(ConfigError):
        made("llama", {**SIZES, key: 0})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope.scaling.type": "spiral"}, "rope.scaling.type 'spiral' is not known"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.factor must be positive, found None"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": -2.0}, "rope.scaling.factor must be positive, found -2"),
        ({"attention.head_count_kv": 0}, "0 heads of keys for 4 of queries"),
        ({"attention.head_count_kv": 8}, "8 heads of keys for 4 of queries"),
    ],
)
def test_what_would_go_wrong_later_is_refused_in_words(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made("llama", {**SIZES, **keys})


@pytest.mark.parametrize("table", [[1.0, 8.0], [1.0, float("nan"), 2.0, 3.0], [1.0, 0.0, 2.0, 3.0]])
def test_a_table_that_cannot_be_divisors_is_refused(table: list[float]) -> None:
    with pytest.raises(ConfigError, match="must hold 4 positive divisors"):
        made("llama", SIZES, rope_freqs=table)
