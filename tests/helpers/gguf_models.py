"""Models of transformers as GGUF files: written with gguf-py, by names and row orders that are spelled out here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from helpers.tiny_transformers import tiny

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PLAIN = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
GEMMA = {
    **PLAIN, "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}

KINDS = {
    bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


def checkpoint_of(model: Any, folder: Path) -> Tensors:
    """Return the tensors that transformers saves of a model, by its names."""
    model.save_pretrained(folder / "saved")
    return load_file(folder / "saved" / "model.safetensors")


def translated(tensors: Mapping[str, torch.Tensor], names: Mapping[str, str] = PLAIN) -> Tensors:
    """Return tensors by the names of GGUF; experts as ``blk.{i}.ffn_{part}.{e}.weight``, as old files have them."""
    out = {}
    for name, tensor in tensors.items():
        stem, ending = name.rsplit(".", 1)
        if stem in TOP:
            out[f"{TOP[stem]}.{ending}"] = tensor
            continue
        _, _, layer, rest = stem.split(".", 3)
        expert = re.fullmatch(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)", rest)
        leaf = f"ffn_{PARTS[expert[2]]}.{expert[1]}" if expert else names[rest]
        out[f"blk.{layer}.{leaf}.{ending}"] = tensor
    return out


def interleaved(tensors: Tensors, heads: int, kv_heads: int) -> Tensors:
    """Return tensors with the rows of each query and key head alternating between its halves."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        if ".attn_q." in name or ".attn_k." in name:
            n = heads if ".attn_q." in name else kv_heads
            rows = torch.arange(tensor.shape[0]).view(n, 2, -1)
            order = [int(rows[h, half, i]) for h in range(n) for i in range(rows.shape[2]) for half in (0, 1)]
            out[name] = tensor[order]
    return out


def stacked(tensors: Tensors, *, fused: bool = False) -> Tensors:
    """Return tensors with the experts of a layer behind each other, gate and up in one tensor if `fused`."""
    out: Tensors = {}
    layers: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"blk\.(\d+)\.ffn_(\w+)\.(\d+)\.weight", name)
        if expert is None:
            out[name] = tensor
        else:
            layers.setdefault((expert[1], expert[2]), {})[int(expert[3])] = tensor
    for (layer, part), some in layers.items():
        out[f"blk.{layer}.ffn_{part}_exps.weight"] = torch.stack([some[n] for n in sorted(some)])
    if fused:
        for layer in {layer for layer, _ in layers}:
            halves = [out.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            out[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(halves, 1)
    return out


def gpt_oss(tensors: Tensors) -> Tensors:
    """Return the tensors of a GPT-OSS checkpoint: gate and up apart, experts not transposed."""
    out = {}
    names = {**PLAIN, "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
    for name, tensor in tensors.items():
        layer = name.split(".")[2] if name.count(".") > 2 else ""
        leaf = name.rsplit(".", 1)[1]
        if leaf == "sinks":
            out[f"blk.{layer}.attn_sinks.weight"] = tensor
        elif leaf.startswith("gate_up_proj"):
            for n, part in enumerate(("gate", "up")):
                ending, rows = ("bias", tensor) if leaf.endswith("bias") else ("weight", tensor.transpose(1, 2))
                one = rows[:, n::2]
                out[f"blk.{layer}.ffn_{part}_exps.{ending}"] = one
        elif leaf.startswith("down_proj"):
            ending, rows = ("bias", tensor) if leaf.endswith("bias") else ("weight", tensor.transpose(1, 2))
            out[f"blk.{layer}.ffn_down_exps.{ending}"] = rows
        else:
            out |= translated({name: tensor}, names)
    return out


LATENT = {
    **PLAIN, "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}  # fmt: skip


def latent_attention(saved: Tensors, *, heads: int, keys: int) -> Tensors:
    """Return the tensors of a DeepSeek checkpoint, `keys` rows of each head being keys: split in two, transposed."""
    biases = {name: t for name, t in saved.items() if name.endswith("correction_bias")}
    tensors = stacked(translated({name: t for name, t in saved.items() if name not in biases}, LATENT))
    for name in [name for name in tensors if name.endswith("attn_kv_b.weight")]:
        both = tensors.pop(name)
        rows = both.view(heads, -1, both.shape[1])
        tensors[name.replace("kv_b", "k_b")] = rows[:, :keys].transpose(1, 2)
        tensors[name.replace("kv_b", "v_b")] = rows[:, keys:]
    return tensors | {f"blk.{name.split('.')[2]}.exp_probs_b.bias": t for name, t in biases.items()}


def metadata_of(architecture: str, config: Any, **more: Any) -> dict[str, Any]:
    """Return what every converter writes of a configuration, and `more`, both below the architecture's name."""
    said = {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters.get("rope_theta", 10000.0), **more,
    }  # fmt: skip
    return {f"{architecture}.{key}": value for key, value in said.items()}


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    packed: Mapping[str, str] | None = None,
) -> Path:
    """Write a file. packed: for tensors whose name ends in a key, the type that they are quantized to by gguf-py."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_key_value(key, value, KINDS.get(type(value), gguf.GGUFValueType.ARRAY))
    for name, tensor in tensors.items():
        values = tensor.contiguous().numpy()
        kind = next((kind for ending, kind in (packed or {}).items() if name.endswith(ending)), None)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama(folder: Path, *, changes: Mapping[str, Any] | None = None, **options: Any) -> tuple[Path, Any]:
    """Write a tiny Llama, and return the file and the model. options: of `write_gguf`; `extra` tensors; `more` keys."""
    model = tiny("Llama", **(changes or {}))
    extra, more = options.pop("extra", {}), options.pop("more", {})
    tensors = interleaved(translated(checkpoint_of(model, folder)), 4, 2)
    path = folder / "model.gguf"
    return write_gguf(path, "llama", metadata_of("llama", model.config, **more), {**tensors, **extra}, **options), model
