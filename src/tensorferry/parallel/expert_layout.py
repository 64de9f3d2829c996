"""Where each projection of each expert lies in the stacked parameters of a rank, and in tensors on disk. Geometry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tensorferry.config import ParallelConfig
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.target import Layout, Slot
from tensorferry.core.transforms import Take
from tensorferry.errors import ConfigError
from tensorferry.parallel.division import Placement, even_part, part_of, placed_experts
from tensorferry.parallel.groups import with_the_same_experts

__all__ = ["PROJECTIONS", "Extent", "StackedExperts", "expert_of", "inner_part", "kind_of", "placement_of", "turns_of"]

Extent = Literal["matrix", "rows", "one"]
"""What a parameter has of each projection: a matrix, a value for each output (a bias), or a single value (a scale)."""

PROJECTIONS = {"w1": "w13", "w3": "w13", "w2": "w2"}
"""Which stacked parameter has a projection: gate (w1), up (w3) and down (w2)."""


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The experts of a rank, stacked along the first dimension of its parameters.

    total: experts of all ranks. here: those of this rank, in their order; one may come more than once. inner: this
    rank's part of the inner dimension, of `intermediate`. transposed: whether matrices are ``[input, output]``.
    """

    total: int
    here: tuple[int, ...]
    hidden: int
    intermediate: int
    inner: range
    transposed: bool

    def shape(self, stack: str, extent: Extent) -> Shape:
        """Return the shape of this rank's parameter `stack`, "w13" or "w2"."""
        halves, inner = (2 if stack == "w13" else 1), len(self.inner)
        if extent == "one":
            return (len(self.here), 2) if halves == 2 else (len(self.here),)
        sizes = list(self.logical("w1" if stack == "w13" else "w2", extent))
        dim = self._inner_dim(stack, extent)
        if dim is not None:
            sizes[dim] = halves * inner
        return (len(self.here), *sizes)

    def logical(self, kind: str, extent: Extent) -> Shape:
        """Return the shape of one expert's tensor of a projection, of all ranks."""
        outputs, inputs = (self.hidden, self.intermediate) if kind == "w2" else (self.intermediate, self.hidden)
        if extent == "matrix":
            return (inputs, outputs) if self.transposed else (outputs, inputs)
        return (outputs,) if extent == "rows" else ()

    def layout(self, stack: str, extent: Extent) -> Layout:
        """Return the slots of this rank's parameter `stack`; those of other ranks' experts are absent."""
        kinds = [kind for kind, where in PROJECTIONS.items() if where == stack]
        slots = {
            slot: self._slot(stack, extent, local, kind)
            for kind in kinds
            for local, slot in enumerate(self.slots(kind))
        }
        absent = {f"{e}.{kind}" for e in range(self.total) if e not in self.here for kind in kinds}
        return Layout(slots, absent=frozenset(absent))

    def slots(self, kind: str) -> Iterator[str]:
        """Yield the slot of a projection of each expert here: "3.w1", or "3.w1@1" where it is here before."""
        return (f"{expert}.{kind}" + (f"@{copy}" if copy else "") for expert, copy in _numbered(self.here))

    def copied(self) -> list[int]:
        """Return the experts that are here more than once."""
        return list(dict.fromkeys(expert for expert, copy in _numbered(self.here) if copy))

    def in_stack(self, slot: str, extent: Extent, stacked: int, *, interleaved: bool, alone: bool) -> Take:
        """Return where a slot lies in a tensor that stacks so many experts.

        alone: it has only gates, or only ups. interleaved: gates and ups lie in turns, not gates above ups.
        """
        kind, expert = kind_of(slot), expert_of(slot)
        half = self.half(kind, extent, interleaved=interleaved, alone=alone).region
        low, high = (expert, *half.box.start), (expert + 1, *half.box.stop)
        return Take(Region((stacked, *half.view), Box(low, high)), self.logical(kind, extent))

    def half(self, kind: str, extent: Extent, *, interleaved: bool = False, alone: bool = False) -> Take:
        """Return where gate or up lies in a tensor that has both of one expert; all of it for down."""
        logical = self.logical(kind, extent)
        if kind == "w2" or alone:
            return Take(Region.whole(logical), logical)
        dim = self._inner_dim("w13", extent) or 0
        at = dim + 1 if interleaved and logical else dim
        view, which = (*logical[:at], 2, *logical[at:]), int(kind == "w3")
        return Take(part_of(view, at, which, which + 1), logical)

    def of_several(self, kind: str, number: int, count: int) -> Take:
        """Return where the matrix of one expert lies in one of `count` times the inner size."""
        logical, dim = self.logical(kind, "matrix"), self._inner_dim(PROJECTIONS[kind], "matrix") or 0
        return Take(part_of((*logical[:dim], count, *logical[dim:]), dim, number, number + 1), logical)

    def _inner_dim(self, stack: str, extent: Extent) -> int | None:
        """Return along which dimension of one expert's tensor the inner dimension lies, if it has that."""
        if extent == "matrix":
            return int((stack == "w2") != self.transposed)
        return 0 if extent == "rows" and stack == "w13" else None

    def _slot(self, stack: str, extent: Extent, local: int, kind: str) -> Slot:
        shape, logical = self.shape(stack, extent), self.logical(kind, extent)
        low, high = [local, *(0 for _ in shape[1:])], [local + 1, *shape[1:]]
        start, stop = [0] * len(logical), list(logical)
        dim, second = self._inner_dim(stack, extent), int(kind == "w3")
        if extent == "one" and stack == "w13":
            low[1], high[1] = second, second + 1
        if dim is not None:
            inner = len(self.inner)
            low[1 + dim], high[1 + dim] = second * inner, (second + 1) * inner
            start[dim], stop[dim] = self.inner.start, self.inner.stop
        window = Region(logical, Box(tuple(start), tuple(stop)))
        return Slot(Region(shape, Box(tuple(low), tuple(high))), logical, window, ((1,),) if logical == () else ())


def kind_of(slot: str) -> str:
    """Return the projection of a slot.

    >>> kind_of("3.w1@1")
    'w1'
    """
    return slot.partition(".")[2].partition("@")[0]


def expert_of(slot: str) -> int:
    """Return the expert of a slot.

    >>> expert_of("3.w1@1")
    3
    """
    return int(slot.partition(".")[0])


def placement_of(
    experts: int, ranks: int, how: Placement, physical_to_logical: Sequence[int] | None
) -> tuple[tuple[int, ...], ...]:
    """Return which experts each rank has: the one table that filling and running both use."""
    if physical_to_logical is None:
        return tuple(placed_experts(experts, ranks, rank, how) for rank in range(ranks))
    if how != "linear":
        raise ConfigError(f"expert placement {how!r}: with redundant experts, places are dealt in blocks: 'linear'")
    lost = sorted(set(range(experts)) - set(physical_to_logical))
    if lost or any(not 0 <= e < experts for e in physical_to_logical):
        raise ConfigError(
            f"physical_to_logical must have every expert from 0 to {experts - 1}, and no other; lost: {lost}"
        )
    places = [placed_experts(len(physical_to_logical), ranks, rank) for rank in range(ranks)]
    return tuple(tuple(physical_to_logical[place] for place in mine) for mine in places)


def inner_part(size: int, parallel: ParallelConfig) -> tuple[range, bool]:
    """Return which part of an expert's inner dimension is here, and whether this rank is the one that adds its bias."""
    sharing = with_the_same_experts(parallel)
    part = even_part(size, sharing.size, sharing.rank, what="experts: intermediate size")
    return part, sharing.rank == 0


def turns_of(placement: Sequence[Sequence[int]], rank: int) -> Mapping[int, tuple[int, int]]:
    """Return, by local place, which of the places of its expert it is, and how many of them there are."""
    numbered = list(_numbered([expert for mine in placement for expert in mine]))
    total: dict[int, int] = {}
    for expert, copy in numbered:
        total[expert] = copy + 1
    first = sum(len(mine) for mine in placement[:rank])
    mine = numbered[first : first + len(placement[rank])]
    return {local: (copy, total[expert]) for local, (expert, copy) in enumerate(mine)}


def _numbered(experts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each expert with how many times it came before."""
    seen: dict[int, int] = {}
    for expert in experts:
        seen[expert] = seen.get(expert, -1) + 1
        yield expert, seen[expert]
