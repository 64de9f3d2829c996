"""Configurations out of params.json: those of published models as they are known, each field with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tensorferry.compat.consolidated.configs import infer_config
from tensorferry.compat.consolidated.refusals import unread
from tensorferry.compat.translation import InferredConfig
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.errors import ConfigError, CorruptFile
from tensorferry.formats.params_json import Params

MISTRAL: Mapping[str, Any] = {
    "dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
    "norm_eps": 1e-05, "vocab_size": 32000,
}  # fmt: skip
LLAMA: Mapping[str, Any] = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "multiple_of": 256, "norm_eps": 1e-05, "vocab_size": -1,
}  # fmt: skip
LLAMA_3 = {
    "vocab_size": 128256, "n_kv_heads": 8, "multiple_of": 1024, "ffn_dim_multiplier": 1.3, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {"factor": 16.0, "original_max_position_embeddings": 16384, "beta": 32, "alpha": 1, "apply_scale": False}


def catalogue(words: int = 32000, *, output: bool = True, **shapes: tuple[int, ...]) -> Catalogue:
    """Return a catalogue of embeddings, norms for many layers, and what `shapes` says, with dots as __."""
    found = {"tok_embeddings.weight": (words, 64), **{f"layers.{n}.ffn_norm.weight": (64,) for n in range(130)}}
    found |= {"output.weight": (words, 64)} if output else {}
    found |= {name.replace("__", "."): shape for name, shape in shapes.items()}
    at = {name: n * 1_000_000 for n, name in enumerate(found)}
    entries = [TensorEntry.at(name, DTYPES["BF16"], shape, "f", at[name]) for name, shape in found.items()]
    return Catalogue(entries, format="torch", files=("f",))


def inferred(base: Mapping[str, Any], entries: Catalogue | None = None, **more: Any) -> InferredConfig:
    return infer_config(Params("params.json", {**base, **more}), entries or catalogue())


def test_mistral_7b() -> None:
    found = inferred(MISTRAL, sliding_window=4096)
    assert found.config == {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "intermediate_size": 14336, "vocab_size": 32000, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32768, "sliding_window": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    assert found.of("inferred") == ["model_type", "architectures", "tie_word_embeddings"]
    assumed = ["hidden_act", "bos_token_id", "eos_token_id", "max_position_embeddings", "rope_parameters"]
    assert found.of("assumed") == assumed


def test_mistral_without_a_window_has_another_base() -> None:
    found = inferred(MISTRAL)
    assert found.config["sliding_window"] is None
    assert found.config["rope_parameters"]["rope_theta"] == 1e6
    assert inferred(MISTRAL, rope_theta=1e8).origin["rope_parameters"] == "read"


def test_mixtral_8x7b() -> None:
    found = inferred(MISTRAL, moe={"num_experts_per_tok": 2, "num_experts": 8})
    assert found.config["model_type"] == "mixtral"
    assert (found.config["num_local_experts"], found.config["num_experts_per_tok"]) == (8, 2)
    assert found.config["rope_parameters"]["rope_theta"] == 1e6
    assert "head_dim" not in found.config


def test_nemo_has_heads_that_are_no_share_of_its_width() -> None:
    found = inferred(MISTRAL, dim=5120, max_seq_len=1024000, rope_theta=1000000.0)
    assert (found.config["hidden_size"], found.config["head_dim"]) == (5120, 128)
    assert found.config["max_position_embeddings"] == 1024000


def test_ministral_8b_repeats_a_pattern_of_windows() -> None:
    found = inferred(MISTRAL, n_layers=36, _sliding_window=[None, 32768, 32768, 32768], max_seq_len=32768)
    assert (found.config["model_type"], found.config["sliding_window"]) == ("ministral", 32768)
    assert found.config["layer_types"][:5] == [
        "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
    ]  # fmt: skip
    assert len(found.config["layer_types"]) == 36


def test_a_pattern_of_one_window_is_a_window() -> None:
    found = inferred(MISTRAL, sliding_window=[4096, 4096])
    assert (found.config["model_type"], found.config["sliding_window"]) == ("mistral", 4096)


def test_ministral_3_has_yarn() -> None:
    scaling = {"original_max_position_embeddings": 16384, "beta": 0.1}
    found = inferred(MISTRAL, yarn=YARN, llama_4_scaling=scaling, tied_embeddings=True, rope_theta=1e6)
    assert (found.config["model_type"], found.origin["tie_word_embeddings"]) == ("ministral3", "read")
    assert found.config["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip


def test_yarn_that_scales_attention_is_left_to_transformers() -> None:
    rope = inferred(MISTRAL, yarn={**YARN, "apply_scale": True}).config["rope_parameters"]
    assert "mscale" not in rope
    assert rope["rope_type"] == "yarn"


def test_llama_1_and_2_differ_in_their_context() -> None:
    one, two = inferred(LLAMA, norm_eps=1e-6), inferred(LLAMA)
    assert (one.config["max_position_embeddings"], two.config["max_position_embeddings"]) == (2048, 4096)
    assert two.config["intermediate_size"] == 11008
    assert two.config["num_key_value_heads"] == 32
    assert (two.config["vocab_size"], two.origin["vocab_size"]) == (32000, "inferred")
    assert "sliding_window" not in two.config


def test_code_llama_has_a_longer_context() -> None:
    assert inferred(LLAMA, rope_theta=1e6).config["max_position_embeddings"] == 16384


def test_llama_3_has_other_special_tokens() -> None:
    found = inferred({**LLAMA, **LLAMA_3}, catalogue(128256))
    assert found.config["intermediate_size"] == 14336
    assert (found.config["bos_token_id"], found.config["eos_token_id"]) == (128000, 128001)
    assert found.config["max_position_embeddings"] == 8192
    assert found.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert found.origin["vocab_size"] == "read"


@pytest.mark.parametrize(("output", "factor"), [(True, 8.0), (False, 32.0)])
def test_llama_3_1_and_the_small_3_2_are_scaled(output: bool, factor: float) -> None:
    found = inferred({**LLAMA, **LLAMA_3}, catalogue(128256, output=output), use_scaled_rope=True)
    assert found.config["rope_parameters"] == {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert found.origin["rope_parameters"] == "assumed"
    assert found.config["max_position_embeddings"] == 131072
    assert found.config["tie_word_embeddings"] is not output


def test_a_factor_that_is_said_is_read() -> None:
    found = inferred({**LLAMA, **LLAMA_3}, use_scaled_rope=True, rope_scaling_factor=16)
    assert (found.config["rope_parameters"]["factor"], found.origin["rope_parameters"]) == (16.0, "read")


def test_a_width_that_no_field_says_is_that_of_the_tensors() -> None:
    plain = {key: value for key, value in LLAMA.items() if key != "multiple_of"}
    found = inferred(plain, catalogue(layers__0__feed_forward__w1__weight=(48, 64)))
    assert (found.config["intermediate_size"], found.origin["intermediate_size"]) == (48, "inferred")


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"vision_encoder": {"hidden_size": 1024}}, "vision_encoder: a vision encoder"),
        ({"multimodal": {"whisper_model_args": {"encoder_args": {"dim": 1280}}}}, "multimodal: an encoder"),
        ({"vision_chunk_size": 448, "vision_num_cross_attention_layers": 8}, r"a vision encoder \(Llama 3\.2\)"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, r"quantization: quantized weights \(fp8_e4m3\)"),
        ({"quantization_args": {"scheme": "int4_weight_int8_dynamic_activation"}}, "quantized weights"),
        ({"lora": {"rank": 64}}, "lora: an adapter"),
        ({"q_lora_rank": 1536, "kv_lora_rank": 512}, "latent attention"),
        ({"moe": {"num_experts": 128, "num_experts_per_tok": 4, "num_shared_experts": 1}}, "moe: num_shared_experts"),
        ({"model_type": "mamba"}, "model_type: 'mamba'"),
        ({"moe_args": {"num_experts": 16}}, "experts of Llama 4"),
    ],
)
def test_what_is_no_plain_model_of_text_is_refused_by_name(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        inferred(MISTRAL, **more)


def test_fields_that_say_nothing_are_no_reason_to_refuse() -> None:
    found = inferred(
        MISTRAL, vision_encoder=None, multimodal={"vision_encoder_args": None}, quantization={}, lora=None,
        vision_chunk_size=-1, model_type="transformer", moe=None,
    )  # fmt: skip
    assert found.config["model_type"] == "mistral"


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"dim": None}, "no dim, without which there is no hidden_size"),
        ({"n_heads": None}, "no n_heads"),
        ({"n_layers": 10**6}, "1,000,000 layers, and"),
        ({"n_kv_heads": 7}, "7 heads of keys for 32 of queries"),
        ({"head_dim": 127}, "cannot be rotated in pairs"),
        ({"moe": {"num_experts": 8}}, "moe: no num_experts_per_tok"),
        ({"moe": {"num_experts": 8, "num_experts_per_tok": 2, "expert_hidden_dim": 5}}, "experts of 5 beside"),
        ({"sliding_window": [None, 1, 2]}, "a pattern that fits them"),
        ({"sliding_window": [None, 8, 8]}, "for 32 layers"),
        ({"llama_4_scaling": {"beta": 0.1}}, "goes with yarn"),
        ({"yarn": {"factor": 4}}, "original_max_position_embeddings are needed"),
        ({"yarn": YARN, "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 5}}, "yarn's is 16384"),
    ],
)
def test_sizes_that_are_absent_or_cannot_be_are_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        inferred(MISTRAL, **more)


def test_a_width_that_is_not_that_of_the_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="makes hidden_dim 11008, and the tensors have 48"):
        inferred(LLAMA, catalogue(layers__0__feed_forward__w1__weight=(48, 64)))


def test_a_value_of_a_wrong_kind_is_the_files_fault() -> None:
    with pytest.raises(CorruptFile, match="norm_eps: a number is expected, found 'small'"):
        inferred(MISTRAL, norm_eps="small")


def test_keys_that_nothing_knows_are_named() -> None:
    assert unread(Params("params.json", {**MISTRAL, "new_trick": 3, "off": False, "max_batch_size": 8})) == (
        "new_trick",
    )
