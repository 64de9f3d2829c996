"""Whether the slots of a parameter cover every element of it exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from tensorferry.core.boxes import Box, Region, Shape, strides_of
from tensorferry.core.target import TargetTensor
from tensorferry.problems import Problem, ProblemKind

__all__ = ["check_slots", "flat_runs", "uncovered"]


def check_slots(tensor: TargetTensor) -> list[Problem]:
    """Return what is wrong with how the slots of `tensor` lie in it: outside, overlapping, leaving gaps."""
    slots = tensor.slots
    if len(slots) == 1:
        (only,) = slots.values()
        if only.local.is_whole and (only.local.view == tensor.shape or only.local.size == prod(tensor.shape)):
            return []
    for name, slot in slots.items():
        if not slot.local.fits(tensor.shape):
            detail = f"slot {name!r} is no region of its shape {tensor.shape}"
            return [Problem(ProblemKind.SHAPE, tensor.name, detail)]
    regions = {name: slot.local for name, slot in slots.items()}
    clash = _first_overlap(list(regions.items()))
    if clash is not None:
        return [Problem(ProblemKind.OVERLAP, tensor.name, f"slots {clash[0]!r} and {clash[1]!r} overlap")]
    covered = sum(r.size for r in regions.values())
    total = prod(tensor.shape)
    if covered != total and tensor.default is None:
        detail = f"its slots cover {covered:,} of {total:,} elements, and no default is declared"
        return [Problem(ProblemKind.GAP, tensor.name, detail)]
    return []


def uncovered(tensor: TargetTensor) -> list[Region]:
    """Return regions of `tensor` that no slot covers, as flat runs; for parameters with a default."""
    size, at, holes = prod(tensor.shape), 0, []
    if sum(slot.local.size for slot in tensor.slots.values()) == size:
        return []
    runs = sorted(run for slot in tensor.slots.values() for run in flat_runs(slot.local))
    for start, stop in [*runs, (size, size)]:
        if start > at:
            holes.append(Region((size,), Box((at,), (start,))))
        at = max(at, stop)
    return holes


def flat_runs(region: Region) -> Iterator[tuple[int, int]]:
    """Yield the half-open intervals of row-major element positions that make up `region`, in order."""
    view, box = region.view, region.box
    if box.size == 0:
        return
    inner = len(view)
    while inner > 0 and box.start[inner - 1] == 0 and box.stop[inner - 1] == view[inner - 1]:
        inner -= 1
    strides = strides_of(view)
    if inner == 0:
        yield 0, prod(view)
        return
    length = (box.stop[inner - 1] - box.start[inner - 1]) * strides[inner - 1]
    for base in _bases(box, strides, inner - 1):
        start = base + box.start[inner - 1] * strides[inner - 1]
        yield start, start + length


def _bases(box: Box, strides: Shape, dims: int) -> Iterator[int]:
    if dims == 0:
        yield 0
        return
    for base in _bases(box, strides, dims - 1):
        for i in range(box.start[dims - 1], box.stop[dims - 1]):
            yield base + i * strides[dims - 1]


def _first_overlap(regions: Sequence[tuple[str, Region]]) -> tuple[str, str] | None:
    if () in (views := {region.view for _, region in regions}) or len(views) > 1:
        return _first_overlap_of_runs(regions)
    live: list[tuple[str, Box]] = []
    for name, region in sorted(regions, key=lambda r: r[1].box.start):
        box = region.box
        if not box.size:
            continue
        live = [(n, b) for n, b in live if b.stop[0] > box.start[0]]
        for other, b in live:
            if b.meet(box):
                return other, name
        live.append((name, box))
    return None


def _first_overlap_of_runs(regions: Sequence[tuple[str, Region]]) -> tuple[str, str] | None:
    runs = sorted((start, stop, name) for name, region in regions for start, stop in flat_runs(region))
    for (_, stop, name), (start, _, other) in pairwise(runs):
        if start < stop:
            return name, other
    return None
