"""How GGUF names the tensors of each architecture, and how transformers' checkpoints do; data, nothing else.

Source: the converter of llama.cpp, whose output was compared with the models that it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["ARCHITECTURES", "TOP", "UNUSED", "Architecture"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The names of one ``general.architecture``, and what its converter does to values.

    blocks: stem below ``blk.{i}`` to stem below ``model.layers.{i}``; weights and biases alike.
    bare: the same for tensors whose whole name differs, ending included.
    experts: projection (gate, up, down) to the name of one expert's weight below ``model.layers.{i}``, with ``{e}``.
    interleaved: the rows of a query or key head alternate between the halves that transformers rotates.
    norms: what was added to the weights of norms.
    """

    blocks: Mapping[str, str]
    bare: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    norms: float = 0.0


TOP: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
"""Stems outside of blocks, the same everywhere."""

UNUSED: Mapping[str, str] = MappingProxyType(
    {
        "rope_freqs.weight": "divisors of the rotary frequencies, which the model computes from its configuration",
        "rope_factors_long.weight": "factors of the rotary frequencies, which are part of the configuration",
        "rope_factors_short.weight": "factors of the rotary frequencies, which are part of the configuration",
        "blk.{i}.attn_rot_embd": "rotary frequencies, which the model computes",
        "blk.{i}.attn_rot_embd.weight": "rotary frequencies, which the model computes",
    }
)
"""Tensors that no parameter takes, and why."""

_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm",
}  # fmt: skip
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_LATENT = {
    "attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm",
}  # fmt: skip
_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {part: f"mlp.experts.{{e}}.{part}_proj.weight" for part in ("gate", "up", "down")}
_MIXTRAL_EXPERTS = {
    part: f"block_sparse_moe.experts.{{e}}.{leaf}.weight"
    for part, leaf in {"gate": "w1", "up": "w3", "down": "w2"}.items()
}
_PLAIN = {**_ATTENTION, **_DENSE, **_TWO_NORMS}

_PLAIN_DEEPSEEK = {
    **_LATENT,
    **_DENSE,
    **_TWO_NORMS,
    **{stem: name.replace("shared_expert", "shared_experts") for stem, name in _SHARED.items()},
    "ffn_gate_inp": "mlp.gate",
}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(
            {**_PLAIN, "ffn_gate_inp": "block_sparse_moe.gate"}, experts=_MIXTRAL_EXPERTS, interleaved=True
        ),
        "qwen2": Architecture(_PLAIN),
        "qwen2moe": Architecture(
            {**_PLAIN, **_SHARED, "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
            experts=_EXPERTS,
        ),
        "qwen3": Architecture({**_PLAIN, **_QK_NORMS}),
        "qwen3moe": Architecture({**_PLAIN, **_QK_NORMS, "ffn_gate_inp": "mlp.gate"}, experts=_EXPERTS),
        "gemma": Architecture(_PLAIN, norms=1.0),
        "gemma2": Architecture({**_ATTENTION, **_DENSE, **_FOUR_NORMS}, norms=1.0),
        "gemma3": Architecture({**_ATTENTION, **_DENSE, **_FOUR_NORMS, **_QK_NORMS}, norms=1.0),
        "phi3": Architecture(
            {**_ATTENTION, **_TWO_NORMS, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj",
             "ffn_down": "mlp.down_proj"},
        ),
        "deepseek2": Architecture(
            _PLAIN_DEEPSEEK,
            {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "exp_probs_b": "mlp.gate.e_score_correction_bias"},
            experts=_EXPERTS,
        ),
        "gpt-oss": Architecture(
            {**_ATTENTION, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
            {"attn_sinks.weight": "self_attn.sinks"},
        ),
    }
)  # fmt: skip
"""By the value of ``general.architecture``. Mistral and Mixtral call themselves llama."""
