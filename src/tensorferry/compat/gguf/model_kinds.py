"""Which fields of a configuration each architecture has, and from which keys of a GGUF file they come; data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tensorferry.compat.gguf.collecting import Field

__all__ = ["COMMON", "MODEL_KINDS", "ModelKind"]


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A kind of model of transformers: its ``model_type``, its class, and its fields beside the common ones.

    theta: the base of the rotary embedding that is assumed where a file does not say.
    """

    model_type: str
    class_name: str
    fields: tuple[Field, ...] = ()
    assumed: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0


COMMON = (
    Field("num_hidden_layers", "block_count"),
    Field("hidden_size", "embedding_length"),
    Field("num_attention_heads", "attention.head_count"),
    Field("max_position_embeddings", "context_length"),
    Field("rms_norm_eps", "attention.layer_norm_rms_epsilon", "number"),
)
_WIDTH = Field("intermediate_size", "feed_forward_length")
_USED = Field("num_experts_per_tok", "expert_used_count")
_EXPERTS = (Field("num_experts", "expert_count"), _USED)
_SILU: Mapping[str, Any] = {"hidden_act": "silu"}
_GELU: Mapping[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}
_WINDOW = Field("sliding_window", "attention.sliding_window", otherwise=None)

MODEL_KINDS: Mapping[str, ModelKind] = MappingProxyType(
    {
        "llama": ModelKind("llama", "LlamaForCausalLM", (_WIDTH,), _SILU),
        "mistral": ModelKind("mistral", "MistralForCausalLM", (_WIDTH,), _SILU),
        "mixtral": ModelKind(
            "mixtral",
            "MixtralForCausalLM",
            (_WIDTH, Field("num_local_experts", "expert_count"), _USED, _WINDOW),
            _SILU,
            theta=1e6,
        ),
        "qwen2": ModelKind("qwen2", "Qwen2ForCausalLM", (_WIDTH,), {**_SILU, "use_sliding_window": False}, theta=1e6),
        "qwen3": ModelKind("qwen3", "Qwen3ForCausalLM", (_WIDTH,), {**_SILU, "use_sliding_window": False}, theta=1e6),
        "qwen2moe": ModelKind(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            (*_EXPERTS, Field("norm_topk_prob", "expert_weights_norm", "flag", otherwise=False)),
            {**_SILU, "use_sliding_window": False, "decoder_sparse_step": 1},
            theta=1e6,
        ),
        "qwen3moe": ModelKind(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            (*_EXPERTS, Field("norm_topk_prob", "expert_weights_norm", "flag", otherwise=True)),
            {**_SILU, "use_sliding_window": False, "decoder_sparse_step": 1},
            theta=1e6,
        ),
        "gemma": ModelKind("gemma", "GemmaForCausalLM", (_WIDTH,), {"hidden_act": "gelu_pytorch_tanh"}),
        "gemma2": ModelKind(
            "gemma2",
            "Gemma2ForCausalLM",
            (
                _WIDTH,
                Field("sliding_window", "attention.sliding_window", otherwise=4096),
                Field("attn_logit_softcapping", "attn_logit_softcapping", "number", otherwise=50.0),
                Field("final_logit_softcapping", "final_logit_softcapping", "number", otherwise=30.0),
            ),
            _GELU,
        ),
        "gemma3": ModelKind(
            "gemma3_text",
            "Gemma3ForCausalLM",
            (
                _WIDTH,
                Field("sliding_window", "attention.sliding_window", otherwise=4096),
                Field("final_logit_softcapping", "final_logit_softcapping", "number", otherwise=None),
            ),
            _GELU,
            theta=1e6,
        ),
        "phi3": ModelKind("phi3", "Phi3ForCausalLM", (_WIDTH,), _SILU),
        "deepseek2": ModelKind(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            (
                _WIDTH,
                Field("q_lora_rank", "attention.q_lora_rank", otherwise=None),
                Field("kv_lora_rank", "attention.kv_lora_rank"),
                Field("qk_rope_head_dim", "rope.dimension_count"),
                Field("n_routed_experts", "expert_count"),
                _USED,
                Field("n_shared_experts", "expert_shared_count", otherwise=None),
                Field("first_k_dense_replace", "leading_dense_block_count", otherwise=0),
                Field("n_group", "expert_group_count", otherwise=1),
                Field("topk_group", "expert_group_used_count", otherwise=1),
                Field("routed_scaling_factor", "expert_weights_scale", "number", otherwise=1.0),
                Field("norm_topk_prob", "expert_weights_norm", "flag", otherwise=False),
            ),
            _SILU,
        ),
        "gpt-oss": ModelKind(
            "gpt_oss",
            "GptOssForCausalLM",
            (
                Field("intermediate_size", "expert_feed_forward_length"),
                Field("num_local_experts", "expert_count"),
                _USED,
                Field("sliding_window", "attention.sliding_window", otherwise=128),
            ),
            _SILU,
            theta=150000.0,
        ),
    }
)
"""By ``general.architecture``; Mistral and Mixtral, which call themselves llama, by what they are."""
