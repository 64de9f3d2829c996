"""What params.json may say that no plain model of text has: refused by name, so that nothing is loaded in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorferry.errors import ConfigError, shown
from tensorferry.formats.params_json import Params

__all__ = ["refuse_unsupported", "unread"]

_REFUSED = {
    "vision_encoder": "a vision encoder (Pixtral and its successors)",
    "multimodal": "an encoder of images or sound",
    "vision_model": "a vision encoder",
    "quantization": "quantized weights",
    "quantization_config": "quantized weights",
    "quantization_args": "quantized weights",
    "lora": "an adapter beside its weights",
    "lora_args": "an adapter beside its weights",
    "q_lora_rank": "latent attention",
    "kv_lora_rank": "latent attention",
    "qk_nope_head_dim": "latent attention",
    "moe_args": "the experts of Llama 4",
    "ada_rms_norm_t_cond": "norms that depend on time",
}
_TEXT_MODELS = ("transformer", "llama", "mistral", "mixtral")
_PLAIN_EXPERTS: Mapping[str, Any] = {
    "num_shared_experts": 0, "first_k_dense_replace": 0, "route_every_n": 1, "routed_scale": 1.0,
    "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
}  # fmt: skip
_KNOWN = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "multiple_of", "ffn_dim_multiplier",
    "norm_eps", "vocab_size", "rope_theta", "use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor",
    "sliding_window", "_sliding_window", "max_seq_len", "max_position_embeddings", "moe", "yarn", "llama_4_scaling",
    "tied_embeddings", "tie_embeddings", "tie_word_embeddings", "activation", "model_type",
    "max_batch_size", "dtype", "vision_chunk_size", "vision_max_num_chunks", "vision_num_cross_attention_layers",
    "bos_token_id", "eos_token_id", "pad_token_id", "architectures", "transformers_version", "torch_dtype",
}  # fmt: skip


def refuse_unsupported(params: Params) -> None:
    """Raise ConfigError where `params` describes more, or something else, than a model of text in plain numbers."""
    for key, what in _REFUSED.items():
        if _says_something(params.data.get(key)):
            detail = _quantized(params) if key == "quantization" else ""
            raise _refusal(params, key, f"{what}{detail}")
    if (params.integer("vision_num_cross_attention_layers") or -1) > 0 or (
        params.integer("vision_chunk_size") or -1
    ) > 0:
        raise _refusal(params, "vision_chunk_size", "a vision encoder (Llama 3.2)")
    kind = params.data.get("model_type")
    if kind is not None and kind not in _TEXT_MODELS:
        raise _refusal(params, "model_type", f"{shown(repr(kind))}")
    moe = params.part("moe")
    for key, plain in _PLAIN_EXPERTS.items() if moe is not None else ():
        if moe is not None and moe.data.get(key) not in (None, plain):
            raise _refusal(moe, key, f"experts that are not Mixtral's ({shown(repr(moe.data[key]))})")


def unread(params: Params) -> tuple[str, ...]:
    """Return the keys of `params` that say something and that nothing here knows."""
    return tuple(key for key, value in params.data.items() if key not in _KNOWN and _says_something(value))


def _refusal(params: Params, key: str, what: str) -> ConfigError:
    return ConfigError(
        f"{params.where}: {key}: {what}, and only plain models of text are made of it here: take the checkpoint that "
        "transformers wrote, or give config and rules"
    )


def _says_something(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_says_something, value.values()))
    return value not in (None, False, "", [], 0)


def _quantized(params: Params) -> str:
    said = params.data["quantization"]
    form = said.get("qformat_weight") or said.get("quant_method") if isinstance(said, dict) else said
    return f" ({shown(str(form))})"
