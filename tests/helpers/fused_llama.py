"""A llama in the manner of small inference engines: fused projections, cut by rank, filled by its own loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

FUSED = {
    "q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "0"), "up_proj": ("gate_up_proj", "1"),
}  # fmt: skip
"""Last but one component of a name, to the fused layer and the part of it."""


class Fused(nn.Module):
    """Matrices of rows behind each other, each cut by rank."""

    def __init__(self, rows: dict[str, int], width: int, tp: int, rank: int) -> None:
        super().__init__()
        self.rows, self.tp, self.rank = rows, tp, rank
        self.weight = nn.Parameter(torch.empty(sum(rows.values()) // tp, width))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor, part: str) -> None:
        counts = {name: count // self.tp for name, count in self.rows.items()}
        at = sum(list(counts.values())[: list(counts).index(part)])
        parameter.data.narrow(0, at, counts[part]).copy_(weight.chunk(self.tp, 0)[self.rank])


class Columns(nn.Module):
    """A matrix whose columns are cut by rank."""

    def __init__(self, height: int, width: int, tp: int, rank: int) -> None:
        super().__init__()
        self.tp, self.rank = tp, rank
        self.weight = nn.Parameter(torch.empty(height, width // tp))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        parameter.data.copy_(weight.chunk(self.tp, 1)[self.rank])


class Whole(nn.Module):
    """A tensor that every rank has."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class FusedLlama(nn.Module):
    """The parameters of a llama with the sizes of `config`, for one of `tp` ranks. It computes nothing.

    rounds: whether its loader makes numbers of what it gets before it copies them, which no tracing follows.
    """

    def __init__(self, config: Any, tp: int = 1, rank: int = 0, *, rounds: bool = False) -> None:
        super().__init__()
        width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
        kv = config.num_key_value_heads * head
        qkv = {"q": config.num_attention_heads * head, "k": kv, "v": kv}
        self.rounds = rounds
        self.model = nn.ModuleDict({"embed_tokens": Whole(config.vocab_size, width), "norm": Whole(width)})
        layers = nn.ModuleList()
        for _ in range(config.num_hidden_layers):
            attention = {"qkv_proj": Fused(qkv, width, tp, rank), "o_proj": Columns(width, qkv["q"], tp, rank)}
            mlp = {"gate_up_proj": Fused({"0": inner, "1": inner}, width, tp, rank)}
            mlp |= {"down_proj": Columns(width, inner, tp, rank)}  # type: ignore[dict-item]
            norms = {name: Whole(width) for name in ("input_layernorm", "post_attention_layernorm")}
            parts = {"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), **norms}
            layers.append(nn.ModuleDict(parts))
        self.model["layers"] = layers
        self.lm_head = Whole(config.vocab_size, width)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, given in weights:
            weight = given * 1.0 if self.rounds and "down_proj" in name else given
            leaf = name.split(".")[-2]
            if leaf in FUSED:
                name, part = name.replace(leaf, FUSED[leaf][0]), FUSED[leaf][1]
                parameters[name].weight_loader(parameters[name], weight, part)  # type: ignore[attr-defined]
            elif (load := getattr(parameters[name], "weight_loader", None)) is not None:
                load(parameters[name], weight)
            else:
                assert parameters[name].shape == weight.shape
                parameters[name].data.copy_(weight)
            loaded.add(name)
        return loaded
