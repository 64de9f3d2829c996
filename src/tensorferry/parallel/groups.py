"""Talking to the other ranks that share a layer: sums and joins, which change nothing for one that is alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tensorferry.config import ParallelConfig
from tensorferry.errors import ConfigError

__all__ = ["Ranks", "with_the_same_experts"]


class Ranks:
    """The ranks among which one dimension of a layer is divided, and which one this is.

    group: of torch.distributed, with `size` members in the order of the ranks; None for the default group, which is
    looked up when a collective is first needed, so that layers can be built, planned and filled without any.
    """

    def __init__(self, size: int = 1, rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size}: 0 to {size - 1} is expected")
        self.size = size
        self.rank = rank
        self._group = group

    def __repr__(self) -> str:
        return f"Ranks(size={self.size}, rank={self.rank})"

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over all ranks, on each of them; `values` itself may be written to."""
        if self.size > 1:
            dist.all_reduce(values, group=self._checked())
        return values

    def join(self, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the `values` of all ranks, of equal shapes, one after the other along `dim`."""
        if self.size == 1:
            return values
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous(), group=self._checked())
        return torch.cat(parts, dim)

    def _checked(self) -> dist.ProcessGroup | None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                f"a layer that is divided among {self.size} ranks can be run only where "
                "torch.distributed.init_process_group was called, in each process that torchrun starts; loading and "
                "planning need none"
            )
        size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        if (size, rank) != (self.size, self.rank):
            raise ConfigError(
                f"the layer was built as rank {self.rank} of {self.size}, and this is rank {rank} of {size} of the "
                "process group: pass the group that the layer is divided among"
            )
        return self._group


def with_the_same_experts(parallel: ParallelConfig) -> Ranks:
    """Return the ranks that have the same experts, neighbours that divide their inner dimension, and which one this is.

    Raises ConfigError where tensor-parallel and expert-parallel ranks do not fit together like that.
    """
    tp, ep = parallel.tp_size, parallel.ep_size
    if ep > tp and ep % tp == 0:
        return Ranks()
    if tp % ep:
        raise ConfigError(
            f"experts: of {tp} tensor-parallel and {ep} expert-parallel ranks, one must divide the other: give another"
            f" ep_size, such as 1 or {tp}"
        )
    size = tp // ep
    if ep > 1 and parallel.ep_rank != parallel.tp_rank // size:
        raise ConfigError(
            f"experts: tensor-parallel rank {parallel.tp_rank} of {tp} is expert-parallel rank"
            f" {parallel.tp_rank // size} of {ep}, not {parallel.ep_rank}: ranks that share experts are neighbours"
        )
    return Ranks(size, parallel.tp_rank % size)
