"""Cutting a plan into portions that are made one after the other, however large a parameter is. Pure.

A portion is a plan of its own: its parameters are whole tensors, or runs of one in the order of its elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import lcm, prod

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.core.transforms import TensorSpec

__all__ = ["portions"]

_Piece = tuple[str, TensorSpec, tuple[Step, ...]]


def portions(plan: Plan, order: Iterable[str], most: int) -> Iterator[Plan]:
    """Yield plans that together make the parameters of `plan` called `order`, in that order.

    The parameters of each take at most `most` bytes: whole ones, or, under the same name, pieces whose bytes are those
    of the parameter from where the last piece ended. A parameter is in one piece, however large, where its steps see it
    in ways that have no common cut, or need all of an entry for each part of it. A tie is made like its owner; drops
    and problems are left behind.
    """
    steps: Mapping[str, list[Step]] = defaultdict(list)
    for step in plan.steps:
        steps[step.parameter].append(step)
    held: list[_Piece] = []
    size = 0
    for name in order:
        for piece in _pieces(name, plan.parameters[name], tuple(steps[name]), most):
            more = piece[1].dtype.nbytes(piece[1].shape)
            if held and (size + more > most or held[-1][0] == name):
                yield _plan(held)
                held, size = [], 0
            held.append(piece)
            size += more
    if held:
        yield _plan(held)


def _plan(pieces: Sequence[_Piece]) -> Plan:
    steps = tuple(step for _, _, some in pieces for step in some)
    return Plan(steps, {name: spec for name, spec, _ in pieces})


def _pieces(name: str, spec: TensorSpec, steps: tuple[Step, ...], most: int) -> Iterator[_Piece]:
    whole = (name, spec, steps)
    if spec.dtype.nbytes(spec.shape) <= most or (view := _common_view(spec, steps)) is None:
        yield whole
        return
    block = lcm(spec.dtype.block, *(s.entry.dtype.block for step in steps for s in step.sources))
    cut: list[_Piece] = []
    for box in _runs(view, most * spec.dtype.block // spec.dtype.block_bytes, block):
        parts = [_part(step, view, box) for step in steps]
        if None in parts or (not cut and any(map(_same_needs, steps, parts))):
            yield whole
            return
        cut.append((name, TensorSpec(spec.dtype, box.shape), tuple(step for some in parts for step in some or ())))
    yield from cut


def _same_needs(step: Step, parts: tuple[Step, ...] | None) -> bool:
    """Whether a run needs all that the whole parameter needs, so that cutting it would read that again and again."""
    return step.via is not None and any(
        [s.region for s in part.sources] == [s.region for s in step.sources] for part in parts or ()
    )


def _common_view(spec: TensorSpec, steps: Sequence[Step]) -> Shape | None:
    """Return a shape of the parameter in which every step fills a box; None where there is none that can be cut."""
    for view in dict.fromkeys([spec.shape, *(step.into.view for step in steps)]):
        if view and view[-1] % spec.dtype.block == 0 and all(step.into.seen_as(view) is not None for step in steps):
            return view
    return None


def _runs(view: Shape, most: int, block: int) -> Iterator[Box]:
    """Cut `view` into boxes that are runs of at most `most` elements, in order; the last dimension by whole blocks."""
    dim = next((d for d in range(len(view)) if prod(view[d + 1 :]) <= most), len(view) - 1)
    rows = max(1, most // max(1, prod(view[dim + 1 :])))
    if dim == len(view) - 1:
        rows = max(block, rows - rows % block)
    for index in product(*map(range, view[:dim])):
        for a in range(0, view[dim], rows):
            b = min(a + rows, view[dim])
            yield Box((*index, a, *(0 for _ in view[dim + 1 :])), (*(i + 1 for i in index), b, *view[dim + 1 :]))


def _part(step: Step, view: Shape, run: Box) -> tuple[Step, ...] | None:
    """Return what of `step` fills the box `run` of the parameter: one step or none. None where it cannot be told."""
    into = step.into.seen_as(view)
    if into is None:
        return None
    common = into.box.meet(run)
    if common is None:
        return ()
    here = Region(run.shape, common.relative_to(run))
    if not step.sources:
        return (step._replace(into=here),)
    inner = Region(into.box.shape, common.relative_to(into.box))
    made = _copied(step, inner) if step.via is None else _computed(step, inner)
    return None if made is None else (made._replace(into=here),)


def _copied(step: Step, inner: Region) -> Step | None:
    ((entry, region),) = step.sources
    part = inner.seen_as(region.shape)
    return None if part is None else step._replace(sources=(Source(entry, region.part(part.box)),))


def _computed(step: Step, inner: Region) -> Step | None:
    assert step.via is not None
    assert step.window is not None
    specs = [TensorSpec(entry.dtype, entry.shape) for entry, _ in step.sources]
    part = inner.seen_as(step.window.shape)
    if part is None or step.window.view != step.via.infer(specs).shape:
        return None
    window = step.window.part(part.box)
    boxes = step.via.pull(window.box, specs)
    read = tuple(Source(s.entry, Region(s.entry.shape, box)) for s, box in zip(step.sources, boxes, strict=True))
    return step._replace(sources=read, window=window)
