"""Norms over all heads of a projection, whose weights are divided as the heads are."""

from __future__ import annotations

import torch

from tensorferry.config import ParallelConfig
from tensorferry.errors import ConfigError
from tensorferry.parallel.division import shared_heads
from tensorferry.parallel.groups import Ranks
from tensorferry.parallel.layer import ParallelLayer
from tensorferry.parallel.linear import ALONE

__all__ = ["HeadParallelRMSNorm"]


class HeadParallelRMSNorm(ParallelLayer):
    """A root-mean-square norm over all heads of queries or of keys together, of which each rank has some.

    heads: of the model; several ranks have the same ones where there are more ranks, as in `QKVParallelLinear`.
    input and output: ``[..., heads here * head_size]``. The mean is that of all ranks' heads, in float32. A norm over
    each head by itself has a weight of one head: that is whole on every rank, and needs no layer.

    Raises ConfigError where neither of heads and ranks divides the other.
    """

    weight: torch.Tensor

    def __init__(
        self,
        heads: int,
        head_size: int,
        eps: float = 1e-6,
        *,
        parallel: ParallelConfig = ALONE,
        group: torch.distributed.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if heads < 1:
            raise ConfigError(f"HeadParallelRMSNorm: {heads} heads: at least 1 is expected")
        self.ranks = Ranks(parallel.tp_size, parallel.tp_rank, group)
        mine, self.replicas = shared_heads(heads, self.ranks.size, self.ranks.rank)
        self.heads, self.head_size, self.eps, self._width = len(mine), head_size, eps, heads * head_size
        rows = range(mine.start * head_size, mine.stop * head_size)
        self.declare_rows("weight", {"": (self._width, rows)}, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` scaled to a mean square of one over all heads, and by this rank's part of the weight."""
        wide = x.float()
        squares = self.ranks.sum(wide.pow(2).sum(-1, keepdim=True)) / self.replicas
        return self.weight * (wide * torch.rsqrt(squares / self._width + self.eps)).to(x.dtype)
