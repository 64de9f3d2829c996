"""From router logits to the experts of each token. Everything is computed in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Routing", "sigmoid_routing", "softmax_routing"]

Routing = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""From router logits ``[tokens, experts]`` and how many experts to use, and the router's bias where it has one: their
weights and numbers, ``[tokens, k]``."""


def softmax_routing(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` likeliest experts of each token, with their probabilities scaled to a sum of one; in float32."""
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), experts


def sigmoid_routing(
    logits: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    *,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `k` experts of each token as DeepSeek-V3 chooses them, with their weights; in float32.

    Scores are sigmoids. `bias` decides who is chosen, and does not weigh: of the experts, in equal `groups`, those in
    the `top_groups` whose two best sum up to most. Weights are the scores, scaled to a sum of `scale`.
    """
    scores = logits.float().sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if groups > 1:
        by_group = choice.view(choice.shape[0], groups, choice.shape[-1] // groups)
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
        out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, False)
        choice = by_group.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)
    experts = choice.topk(k, dim=-1).indices
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, experts
