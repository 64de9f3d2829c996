"""Which part of a dimension, of attention heads or of experts is a rank's. Pure arithmetic, without tensors.

Here alone is decided who has what: planning, pushing tensors, saving and running derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.target import Slot
from tensorferry.errors import ConfigError

__all__ = [
    "Heads",
    "Placement",
    "even_part",
    "padded",
    "part_of",
    "part_slot",
    "placed_experts",
    "shared_heads",
    "split_heads",
]

Placement = Literal["linear", "round_robin"]
"""How experts are dealt to ranks: in blocks, the first ranks one more where they do not divide; or in turns."""


def even_part(size: int, ranks: int, rank: int, *, what: str) -> range:
    """Return the part of ``range(size)`` that is `rank`'s. Raises ConfigError where `ranks` do not divide it.

    what: what is divided, for the message.

    >>> even_part(8, 4, 1, what="rows")
    range(2, 4)
    """
    if size % ranks:
        raise ConfigError(f"{what}: {size} cannot be divided among {ranks} ranks: pad it, or use a divisor of {size}")
    each = size // ranks
    return range(rank * each, (rank + 1) * each)


def padded(size: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is no less than `size`.

    >>> padded(130, 64), padded(128, 64)
    (192, 128)
    """
    return -(-size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of one rank: query heads, key and value heads; how many ranks have each of the latter."""

    query: range
    kv: range
    replicas: int


def split_heads(heads: int, kv_heads: int, ranks: int, rank: int) -> Heads:
    """Return which heads are `rank`'s. Key and value heads are replicated where there are more ranks than heads.

    Raises ConfigError where the query heads cannot be divided, or neither of key-value heads and ranks divides the
    other, or query heads would be apart from the key-value head that they use.

    >>> split_heads(8, 2, 4, 3)
    Heads(query=range(6, 8), kv=range(1, 2), replicas=2)
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"{heads} attention heads cannot share {kv_heads} key-value heads")
    query = even_part(heads, ranks, rank, what="attention heads")
    kv, replicas = shared_heads(kv_heads, ranks, rank)
    return Heads(query, kv, replicas)


def shared_heads(heads: int, ranks: int, rank: int) -> tuple[range, int]:
    """Return which of key-value heads are `rank`'s, and how many ranks have each: more than one where ranks are more.

    Raises ConfigError where neither of heads and ranks divides the other.

    >>> [shared_heads(2, 4, rank)[0] for rank in range(4)]
    [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    """
    if ranks <= heads:
        return even_part(heads, ranks, rank, what="key-value heads"), 1
    if ranks % heads:
        raise ConfigError(f"{heads} key-value heads cannot be replicated on {ranks} ranks: one must divide the other")
    replicas = ranks // heads
    return range(rank // replicas, rank // replicas + 1), replicas


def placed_experts(experts: int, ranks: int, rank: int, how: Placement = "linear") -> tuple[int, ...]:
    """Return the experts of `rank`, in the order in which it holds them. Uneven counts are fine.

    >>> placed_experts(8, 3, 0), placed_experts(8, 2, 1, "round_robin")
    ((0, 1, 2), (1, 3, 5, 7))
    """
    if how not in get_args(Placement):
        raise ConfigError(f"expert placement {how!r}: one of {', '.join(get_args(Placement))} is expected")
    if experts < ranks:
        raise ConfigError(f"{experts} experts cannot be placed on {ranks} ranks: some would have none")
    if how == "round_robin":
        return tuple(range(rank, experts, ranks))
    each, more = divmod(experts, ranks)
    first = rank * each + min(rank, more)
    return tuple(range(first, first + each + (rank < more)))


def part_slot(local: Shape, at: int, logical: Shape, part: range, dim: int) -> Slot:
    """Return the slot that takes `part` of dimension `dim` of a `logical` tensor to ``at`` and on in a `local` one.

    Both tensors are taken whole along the other dimensions. What of `part` lies past the end of the logical tensor,
    as in the last rank's part of one that was padded, is not taken.
    """
    start, stop = min(part.start, logical[dim]), min(part.stop, logical[dim])
    return Slot(part_of(local, dim, at, at + stop - start), logical, part_of(logical, dim, start, stop))


def part_of(shape: Shape, dim: int, start: int, stop: int) -> Region:
    """Return `start` to `stop` of dimension `dim` of a tensor of `shape`, which is taken whole along the others."""
    low, high = [0] * len(shape), list(shape)
    low[dim], high[dim] = start, stop
    return Region(shape, Box(tuple(low), tuple(high)))
