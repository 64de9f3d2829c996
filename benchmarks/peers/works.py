"""The works that contestants do: which checkpoint, which part of it, into what memory. Pure, without torch.

A work is the same for every contestant; its checkpoints come in three sizes, of which the smallest is for warming up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

__all__ = [
    "CHECKPOINTS",
    "RANK",
    "RANKS",
    "SIZES",
    "WORKS",
    "Checkpoint",
    "Part",
    "Shape",
    "Work",
    "bytes_of",
    "local_shape",
    "part_of",
]

Shape = tuple[int, ...]
Part = tuple[int, int, int]
"""A dimension of a tensor, and the first index and the number of those that a rank takes of it."""

RANK, RANKS = 1, 4
SIZES = ("large", "small", "toy")

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_COLUMNS = ("o_proj", "down_proj")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors of bfloat16 under a name, and the config.json beside them; `layers` and `few` are for large and small."""

    name: str
    config: Mapping[str, Any]
    layers: int
    few: int

    def sized(self, size: str) -> dict[str, Any]:
        """Return the configuration in one of `SIZES`."""
        layers = {"large": self.layers, "small": self.few, "toy": 2}[size]
        return {**self.config, **(_TOY if size == "toy" else {}), "num_hidden_layers": layers}

    def shapes(self, size: str) -> dict[str, Shape]:
        """Return the shape of every tensor, in the order of the files."""
        config = self.sized(size)
        return _many(config) if config["model_type"] == "many" else _decoder(config)


@dataclass(frozen=True, slots=True)
class Work:
    """What every contestant has to do.

    family: of which files ("safetensors", "bin" or "gguf") contestants that read no format of their own read. part:
    "full", or "tp" or "ep" for one rank's. touched: whether the memory of the parameters has been written to before.
    caches: states of the page cache in which it is done.
    """

    name: str
    title: str
    checkpoint: str
    family: str = "safetensors"
    part: str = "full"
    touched: bool = False
    caches: tuple[str, ...] = ("cold", "warm")


_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {
    **_LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": 1792,
    "num_local_experts": 16, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
_TOY = {
    "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 4, "per_layer": 20,
}  # fmt: skip
_FEW_LAYERS = 8  # of the files that are decoded while they are loaded

CHECKPOINTS = {
    one.name: one
    for one in (
        Checkpoint("llama", _LLAMA, layers=24, few=3),
        Checkpoint("moe", _MOE, layers=8, few=1),
        Checkpoint("many", {"model_type": "many", "per_layer": 200}, layers=100, few=100),
        Checkpoint("q8_0", _LLAMA, layers=_FEW_LAYERS, few=1),
        Checkpoint("q4_k", _LLAMA, layers=_FEW_LAYERS, few=1),
    )
}
WORKS = {
    one.name: one
    for one in (
        Work("full", "Llama, everything", "llama"),
        Work("reload", "Llama, everything, into used memory", "llama", touched=True, caches=("warm",)),
        Work("tp", f"Llama, rank {RANK} of tp {RANKS}", "llama", part="tp"),
        Work("moe", "MoE of 16 experts, everything", "moe"),
        Work("ep", f"MoE of 16 experts, rank {RANK} of ep {RANKS}", "moe", part="ep"),
        Work("many", "many small tensors", "many"),
        Work("bin", "Llama as .bin, everything", "llama", family="bin"),
        Work("q8_0", "GGUF, Q8_0 to bfloat16", "q8_0", family="gguf"),
        Work("q4_k", "GGUF, Q4_K to bfloat16", "q4_k", family="gguf"),
    )
}  # fmt: skip


def part_of(work: Work, size: str) -> dict[str, Part | None]:
    """Return what the rank takes of each tensor that it needs: None for all of it.

    >>> part_of(WORKS["tp"], "toy")["model.layers.0.self_attn.o_proj.weight"]
    (1, 64, 64)
    """
    shapes = CHECKPOINTS[work.checkpoint].shapes(size)
    if work.part == "ep":
        experts = CHECKPOINTS[work.checkpoint].sized(size)["num_local_experts"] // RANKS
        mine = range(RANK * experts, (RANK + 1) * experts)
        return {n: None for n in shapes if not (m := _EXPERT.search(n)) or int(m[1]) in mine}
    return {name: _part(name, shape) if work.part == "tp" else None for name, shape in shapes.items()}


def bytes_of(work: Work, size: str) -> int:
    """Return how many bytes the rank's part has, as bfloat16."""
    shapes = CHECKPOINTS[work.checkpoint].shapes(size)
    return sum(2 * prod(local_shape(shapes[name], part)) for name, part in part_of(work, size).items())


def local_shape(shape: Shape, part: Part | None) -> Shape:
    """Return the shape of the part of a tensor.

    >>> local_shape((8, 4), (1, 2, 2))
    (8, 2)
    """
    return tuple(part[2] if part and d == part[0] else n for d, n in enumerate(shape))


def _part(name: str, shape: Shape) -> Part | None:
    dim = 0 if any(row in name for row in _ROWS) else 1 if any(column in name for column in _COLUMNS) else None
    return None if dim is None else (dim, RANK * (shape[dim] // RANKS), shape[dim] // RANKS)


def _decoder(config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    found: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _block(config).items()}
    return {**found, "model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def _block(config: Mapping[str, Any]) -> dict[str, Shape]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, Shape] = {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
    }  # fmt: skip
    if experts := config.get("num_local_experts", 0):
        found["block_sparse_moe.gate"] = (experts, hidden)
        for e in range(experts):
            of_expert = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
            found |= {f"block_sparse_moe.experts.{e}.{name}": shape for name, shape in of_expert.items()}
    else:
        found |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    return {**found, "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}


def _many(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return shapes of 2 to 16 KiB."""
    layers, each = range(config["num_hidden_layers"]), range(config["per_layer"])
    return {f"layers.{layer}.part{n:03}": (64, 16 << n % 4) for layer in layers for n in each}
