"""Which part of a whole parameter a rank has, for parameters that are cut where they are. Geometry alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tensorferry.config import ParallelConfig
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.errors import ConfigError
from tensorferry.parallel import Ranks, even_part, placed_experts

__all__ = ["RankPart", "cut_dim", "cut_experts", "cut_packed", "whole"]


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's part of a parameter.

    region: what it has of the whole. shape: of its parameter. into: where in that the part lies; None for all of it.
    default: value of what the part does not fill. nothing: whether that is all of it.
    """

    region: Region
    shape: Shape
    into: Region | None = None
    default: float | None = None
    nothing: bool = False

    def rows(self, rows: range) -> RankPart:
        """Return the part that has these of the first dimension of this one, which is whole."""
        return _cut(self, 0, rows)


def whole(parameter: torch.Tensor) -> RankPart:
    """Return the part that is all of a parameter."""
    shape = tuple(parameter.shape)
    return RankPart(Region.whole(shape), shape)


def cut_dim(part: RankPart, dim: int, ranks: Ranks, what: str) -> RankPart:
    """Return the rank's share of dimension `dim`. Raises ConfigError where the ranks do not divide it."""
    return _cut(part, dim, even_part(part.shape[dim], ranks.size, ranks.rank, what=f"{what}, dimension {dim}"))


def cut_packed(part: RankPart, dim: int, ranks: Ranks, what: str) -> RankPart:
    """Return the rank's share of each half of dimension `dim`, such as of gate and of up. Raises ConfigError."""
    size = part.shape[dim]
    mine = even_part(size // 2, ranks.size, ranks.rank, what=f"{what}, half of dimension {dim}")
    view, box = part.region.view, part.region.box
    start = (*box.start[:dim], 0, mine.start, *box.start[dim + 1 :])
    stop = (*box.stop[:dim], 2, mine.stop, *box.stop[dim + 1 :])
    halves = (*view[:dim], 2, size // 2, *view[dim + 1 :])
    shape = (*part.shape[:dim], 2 * len(mine), *part.shape[dim + 1 :])
    return replace(part, region=Region(halves, Box(start, stop)), shape=shape)


def cut_experts(part: RankPart, parallel: ParallelConfig, what: str) -> RankPart:
    """Return the rank's experts, numbered along the first dimension and dealt in blocks. Raises ConfigError."""
    try:
        mine = placed_experts(part.shape[0], parallel.ep_size, parallel.ep_rank)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    return _cut(part, 0, range(mine[0], mine[-1] + 1))


def _cut(part: RankPart, dim: int, mine: range) -> RankPart:
    view, box = part.region.view, part.region.box
    start, stop = list(box.start), list(box.stop)
    start[dim], stop[dim] = mine.start, mine.stop
    shape = (*part.shape[:dim], len(mine), *part.shape[dim + 1 :])
    return replace(part, region=Region(view, Box(tuple(start), tuple(stop))), shape=shape)
