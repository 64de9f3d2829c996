"""What modules of transformers that are divided in place have to do when they run: choose, mask and sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tensorferry.config import ParallelConfig
from tensorferry.parallel import Ranks, VocabParallelEmbedding, placed_experts

__all__ = ["choose_own_experts", "look_up_by_rank", "sum_over_ranks"]


def sum_over_ranks(module: nn.Module, ranks: Ranks) -> None:
    """Let `module` return the sum of what it returns on all ranks."""
    module.register_forward_hook(lambda _, __, out: ranks.sum(out.clone()))


def choose_own_experts(module: Any, experts: int, parallel: ParallelConfig) -> None:
    """Let `module` run the experts of this rank only, for what its router chose among all of them.

    It is called with hidden states, the numbers of experts for each token, and their weights. Tokens of other ranks'
    experts are sent to the first one here with a weight of zero.
    """
    mine = placed_experts(experts, parallel.ep_size, parallel.ep_rank)
    module.num_experts = len(mine)

    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (hidden, chosen, weights), rest = _routed(given, named), dict(named)
        for name in (name for names in _NAMES for name in names):
            rest.pop(name, None)
        here = (chosen >= mine[0]) & (chosen <= mine[-1])
        local = torch.where(here, chosen - mine[0], 0)
        return (hidden, local, torch.where(here, weights, 0).to(weights.dtype), *given[3:]), rest

    module.register_forward_pre_hook(before, with_kwargs=True)


_NAMES = (("hidden_states",), ("top_k_index", "router_indices"), ("top_k_weights", "routing_weights"))


def _routed(given: tuple[Any, ...], named: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, numbers and weights, however they were passed."""
    left = _NAMES[len(given) :]
    hidden, numbers, weights, *_ = (*given, *(next(named[n] for n in names if n in named) for names in left))
    return hidden, numbers, weights


def look_up_by_rank(module: nn.Module, ours: VocabParallelEmbedding) -> None:
    """Let an embedding that does more than look up find its rank's tokens, and have zeros for others; then sum."""

    def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, module._mine = ours.rows_of(given[0])
        return (rows, *given[1:])

    def after(_: nn.Module, __: object, out: torch.Tensor) -> torch.Tensor:
        mine: Any = module.__dict__.pop("_mine")
        return ours.ranks.sum(out.masked_fill(~mine.unsqueeze(-1), 0))

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
