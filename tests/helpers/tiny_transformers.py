"""Tiny models of transformers with random weights, and what makes two loaded models the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_BERT = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
_T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
_GPT2 = {
    "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", SIZES),
    "tied Llama": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    "Qwen2": ("Qwen2ForCausalLM", SIZES),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {**SIZES, **_MOE, "num_experts": 12, "head_dim": 8}),
    "Mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 12}),
    "Gemma2": ("Gemma2ForCausalLM", {**SIZES, "head_dim": 8}),
    "GPT-2": ("GPT2LMHeadModel", _GPT2),
    "BERT": ("BertForMaskedLM", _BERT),
    "T5": ("T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}),
    "Phi3": ("Phi3ForCausalLM", SIZES),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", {**SIZES, **_MOE, **_MLA}),
    "GPT-OSS": ("GptOssForCausalLM", {**SIZES, "num_local_experts": 4, "head_dim": 8, "rope_parameters": None}),
    "Mamba": (
        "MambaForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8, "eos_token_id": 2},
    ),
}
"""Class and configuration by a short name: the fixed subset that tests load both ways."""


def tiny(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model of `MODELS` with random weights, the same each time; `changes` go into its configuration."""
    import transformers

    kind, settings = MODELS[name]
    model_class = getattr(transformers, kind)
    settings = {k: v for k, v in {**settings, **changes}.items() if v is not None}
    torch.manual_seed(0)
    return model_class(model_class.config_class(**settings)).to(dtype).eval()


def saved(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes: Any) -> Path:
    """Write a model of `MODELS` with its own `save_pretrained`, in shards of at most `shard`, and return the folder."""
    tiny(name, dtype=dtype, **changes).save_pretrained(folder, max_shard_size=shard)
    return folder


def by_transformers(folder: Path) -> Any:
    """Return what `from_pretrained` makes of a folder, by the class that its config.json names."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder)


def differences(ours: Any, theirs: Any) -> list[str]:
    """Return what differs between two models, bit for bit; empty for the same."""
    found = _tensors(ours.state_dict(), theirs.state_dict())
    found += _tensors(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    generation = [getattr(m, "generation_config", None) for m in (ours, theirs)]
    pairs = {
        "parameters, ties left out": [[n for n, _ in m.named_parameters()] for m in (ours, theirs)],
        "requires_grad": [[p.requires_grad for p in m.parameters()] for m in (ours, theirs)],
        "config": [m.config.to_dict() for m in (ours, theirs)],
        "name_or_path": [m.config.name_or_path for m in (ours, theirs)],
        "dtype": [m.dtype for m in (ours, theirs)],
        "training": [m.training for m in (ours, theirs)],
        "generation config": [g.to_dict() if g is not None else None for g in generation],
        "ties": [m.all_tied_weights_keys for m in (ours, theirs)],
    }
    return found + [what for what, (a, b) in pairs.items() if a != b]


def _tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    if list(ours) != list(theirs):
        return [f"names: {sorted(ours.keys() ^ theirs.keys())}"]
    return [name for name in ours if not equal_bits(ours[name], theirs[name])]


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors have the same type, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return the logits for fixed token ids."""
    ids = torch.arange(3, 19).reshape(1, 16)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    made: torch.Tensor = model(input_ids=ids, **more).logits
    return made
