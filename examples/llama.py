"""A decoder of the Llama family on tensorferry's parallel layers: a model as an inference engine would write it.

It fuses q, k and v, and gate and up, has a mixture of experts where the configuration says so, and divides everything
among ranks. What it does not do is load weights: `weight_rules` says which tensors of a Hugging Face checkpoint go
where.

    torchrun --nproc-per-node 2 examples/llama.py FOLDER --prompt "1, 2, 3, 4,"
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import tensorferry
from tensorferry import Ignore, ParallelConfig, Place, RuleSet
from tensorferry.parallel import (
    FusedMoE,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

ALONE = ParallelConfig()
Config = dict[str, Any]
"""A config.json of Hugging Face's: llama, mistral, qwen2 or mixtral."""


class RMSNorm(nn.Module):
    """Scales hidden states to a mean square of one, in float32, and by a weight."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["hidden_size"]), requires_grad=False)
        self.eps = config["rms_norm_eps"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over this rank's heads."""

    def __init__(self, config: Config, parallel: ParallelConfig) -> None:
        super().__init__()
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        self.head_size = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        bias = bool(config.get("attention_bias", config["model_type"] == "qwen2"))
        self.qkv_proj = QKVParallelLinear(hidden, self.head_size, heads, kv_heads, bias, parallel=parallel)
        out_bias = bool(config.get("attention_bias", False))
        self.o_proj = RowParallelLinear(heads * self.head_size, hidden, out_bias, parallel=parallel)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.reshape(*part.shape[:-1], -1, self.head_size).transpose(1, 2) for part in self._qkv(x))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        joined: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return joined

    def _qkv(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.qkv_proj.split(self.qkv_proj(x))


class MLP(nn.Module):
    """Gate and up in one, then down."""

    def __init__(self, config: Config, parallel: ParallelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config["hidden_size"], config["intermediate_size"], bool(config.get("mlp_bias"))
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias, names=("gate", "up"), parallel=parallel
        )
        self.down_proj = RowParallelLinear(inner, hidden, bias, parallel=parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return out


class Experts(nn.Module):
    """A router, and the experts that it chooses among."""

    def __init__(self, config: Config, parallel: ParallelConfig) -> None:
        super().__init__()
        hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
        self.gate = ReplicatedLinear(hidden, experts, bias=False)
        self.experts = FusedMoE(experts, config["num_experts_per_tok"], hidden, inner, parallel=parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(x, self.gate(x))
        return out


class Block(nn.Module):
    """One layer of the decoder."""

    def __init__(self, config: Config, parallel: ParallelConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(config), RMSNorm(config)
        self.self_attn = Attention(config, parallel)
        self.mlp = (Experts if "num_local_experts" in config else MLP)(config, parallel)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The decoder with its output head. input: token ids ``[batch, tokens]``; output: logits, on every rank."""

    def __init__(self, config: Config, parallel: ParallelConfig = ALONE) -> None:
        super().__init__()
        self.config, tokens, hidden = config, config["vocab_size"], config["hidden_size"]
        self.embed_tokens = VocabParallelEmbedding(tokens, hidden, parallel=parallel)
        self.layers = nn.ModuleList(Block(config, parallel) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config)
        self.lm_head = ParallelLMHead(tokens, hidden, parallel=parallel)
        if config.get("tie_word_embeddings"):
            self.lm_head.tie_weights(self.embed_tokens)

    @property
    def weight_rules(self) -> RuleSet:
        """Where the tensors of a Hugging Face checkpoint go. Names that stay as they are need no rule."""
        attention, mlp = "layers.{i}.self_attn.", "layers.{i}.mlp."
        placed = [
            Place(f"model.{attention}{slot}_proj.{{leaf:part}}", f"{attention}qkv_proj.{{leaf}}", slot)
            for slot in "qkv"
        ]
        placed += [
            Place(f"model.{mlp}{slot}_proj.{{leaf:part}}", f"{mlp}gate_up_proj.{{leaf}}", slot)
            for slot in ("gate", "up")
        ]
        moe = next((m for m in self.modules() if isinstance(m, FusedMoE)), None)
        routed = "model.layers.{i}.block_sparse_moe."
        experts = moe.rules(f"{mlp}experts.", routed + "experts.{e}.", gate="w1", up="w3", down="w2") if moe else ()
        return RuleSet(
            *placed,
            *experts,
            Place(routed + "gate.weight", f"{mlp}gate.weight"),
            Ignore("{any:path}.rotary_emb.inv_freq", "computed by the model"),
            Place("model.{rest:path}", "{rest}"),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        cos, sin = rotary_tables(self.config, ids.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def rotary_tables(config: Config, tokens: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of every position, ``[tokens, head size]``, in the dtype and on the device of `like`."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise ValueError("this example knows the plain rotary embedding only")
    exponents = torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size
    angles = torch.arange(tokens, device=like.device)[:, None] / rope["rope_theta"] ** exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs of elements, half a head apart, by the angles of their positions."""
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-other, one], dim=-1) * sin


def load_llama(folder: Path, parallel: ParallelConfig = ALONE, *, dtype: torch.dtype | None = None) -> Llama:
    """Return the model of `folder` on meta first, then filled with this rank's parts, and nothing else read."""
    config = json.loads((folder / "config.json").read_text())
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or torch.float32)
    try:
        with torch.device("meta"):
            model = Llama(config, parallel)
    finally:
        torch.set_default_dtype(before)
    tensorferry.load(model, folder, rules=model.weight_rules)
    return model


@torch.inference_mode()
def go_on(model: Llama, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the likeliest next tokens, one after the other; every rank returns the same."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=-1)
    return ids


def main() -> None:
    """Load a model on every rank that torchrun started, or on this one, and print what it makes of a prompt."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description="Let a Llama-like model go on from a prompt.")
    parser.add_argument("folder", type=Path, help="a Hugging Face checkpoint: llama, mistral, qwen2 or mixtral")
    parser.add_argument("--prompt", default="1, 2, 3, 4,")
    parser.add_argument("--new-tokens", type=int, default=24)
    arguments = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    model = load_llama(arguments.folder, ParallelConfig(tp_size=ranks, tp_rank=rank))
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    ids = tokenizer(arguments.prompt, return_tensors="pt")["input_ids"]
    made = go_on(model, ids, arguments.new_tokens)
    if rank == 0:
        print(tokenizer.decode(made[0], skip_special_tokens=True))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
