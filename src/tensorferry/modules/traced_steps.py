"""From what a traced loader leaves in the memory of a parameter to steps of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.coverage import flat_runs
from tensorferry.core.plan import Source, Step
from tensorferry.core.transforms import Take, TensorSpec, Transpose
from tensorferry.modules.contents import Patch
from tensorferry.modules.regions import as_box, as_region
from tensorferry.modules.views import Copy, in_order, rounds

__all__ = ["fill_steps", "steps_of"]

FEW = 64
"""Most steps that one copy becomes before it counts as no plain copy."""

VERY_FEW = 8
"""Most steps that one copy becomes rather than one transpose, which cannot be read straight into a parameter."""


def steps_of(parameter: str, spec: TensorSpec, patch: Patch) -> list[Step] | None:
    """Return the steps that put `patch` into a parameter, row-major positions; None where they would be too many."""
    copy = patch.copy.tidy()
    if patch.entry is None:
        return _filled(parameter, spec, copy, patch.fill)
    parts = in_order(copy, FEW)
    if parts is None or len(parts) > VERY_FEW:
        step = _transposed(parameter, spec, copy, patch.entry)
        if step is not None:
            return [step]
    if parts is None:
        return None
    steps: list[Step] = []
    for part in parts:
        more = _plain(parameter, spec, part, patch.entry)
        if more is None or len(steps) + len(more) > FEW:
            return None
        steps += more
    return steps


def fill_steps(parameter: str, spec: TensorSpec, steps: Sequence[Step], value: float) -> list[Step] | None:
    """Return fills of what `steps` leave of the parameter; None where it is scattered."""
    holes = list(_holes(sorted(run for step in steps for run in flat_runs(step.into)), prod(spec.shape)))
    if len(holes) > FEW:
        return None
    size = prod(spec.shape)
    return [Step(parameter, Region((size,), Box((a,), (b,))), (), fill=value) for a, b in holes]


def _holes(runs: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    at = 0
    for start, stop in [*runs, (size, size)]:
        if start > at:
            yield at, start
        at = max(at, stop)


def _filled(parameter: str, spec: TensorSpec, copy: Copy, value: float) -> list[Step] | None:
    into = as_region(copy.into, [(a.size, a.into) for a in copy.axes], spec.shape)
    return None if into is None else [Step(parameter, into, (), fill=value)]


def _plain(parameter: str, spec: TensorSpec, copy: Copy, entry: TensorEntry) -> list[Step] | None:
    """Return steps for a copy that reads in the order in which it writes."""
    into = as_region(copy.into, [(a.size, a.into) for a in copy.axes], spec.shape)
    source = as_region(copy.source, [(a.size, a.source) for a in copy.axes], entry.shape)
    if into is not None and source is not None:
        return [_step(parameter, into, entry, source)]
    if not copy.axes or copy.axes[0].size > FEW:
        return None
    steps: list[Step] = []
    for one in rounds(copy):
        more = _plain(parameter, spec, one, entry)
        if more is None or len(steps) + len(more) > FEW:
            return None
        steps += more
    return steps


def _step(parameter: str, into: Region, entry: TensorEntry, source: Region) -> Step:
    is_made = entry.made is not None and entry.made.via is not None
    if source.view == entry.shape or entry.span is not None or is_made:
        return Step(parameter, into, (Source(entry, source),))
    window = Region.whole(source.shape)
    return Step(parameter, into, (Source(entry, Region.whole(entry.shape)),), Take(source, source.shape), window)


def _transposed(parameter: str, spec: TensorSpec, copy: Copy, entry: TensorEntry) -> Step | None:
    """Return a step that exchanges dimensions of the entry, where that is all that the copy does."""
    into = as_region(copy.into, [(a.size, a.into) for a in copy.axes], spec.shape)
    found = as_box(copy.source, [(a.size, a.source) for a in copy.axes], entry.shape)
    if into is None or found is None:
        return None
    box, order = found
    dims = (*(d for d in range(len(entry.shape)) if d not in order), *order)
    made = tuple(entry.shape[d] for d in dims)
    window = Region(made, Box(tuple(box.start[d] for d in dims), tuple(box.stop[d] for d in dims)))
    return Step(parameter, into, (Source(entry, Region(entry.shape, box)),), Transpose(dims), window)
