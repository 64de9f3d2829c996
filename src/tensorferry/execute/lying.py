"""Where parameters lie in files just as they will lie in memory. Arithmetic on plans; nothing is read here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from math import prod
from typing import NamedTuple

from tensorferry.core.boxes import Region, strides_of
from tensorferry.core.cutting import in_blocks
from tensorferry.core.dtypes import DType
from tensorferry.core.plan import Plan, Step

__all__ = ["Paged", "PlainRun", "beginnings", "paged", "plain_run", "whole_runs"]


class PlainRun(NamedTuple):
    """Bytes of one file that are, as they are, bytes of a parameter: `length` of them, from `start` to `at`."""

    file: str
    start: int
    at: int
    length: int


def plain_run(plan: Plan, step: Step) -> PlainRun | None:
    """Return what `step` copies, where that is one run of bytes on both sides and of one type; else None."""
    dtype = plan.parameters[step.parameter].dtype
    if step.via is not None or len(step.sources) != 1:
        return None
    ((entry, region),) = ((s.entry, s.region) for s in step.sources)
    if entry.dtype != dtype or entry.span is None or not region.size:
        return None
    lies, goes = _extent(region, dtype), _extent(step.into, dtype)
    if lies is None or goes is None:
        return None
    return PlainRun(entry.span.file, entry.span.offset + lies[0], goes[0], lies[1])


class Paged(NamedTuple):
    """A parameter that lies in memory as it does in files, page by page, if its address equals `begin` modulo a page.

    runs: those that then are pages of files, but for their ends. steps: by which numbers they are in the plan; what its
    other steps bring has to be copied.
    """

    begin: int
    runs: tuple[PlainRun, ...]
    steps: tuple[int, ...]


def paged(plan: Plan, wanted: Collection[str], *, page: int, least: int) -> dict[str, Paged]:
    """Return those of the `wanted` parameters that are filled as a whole, and of which runs are pages of files.

    Runs of a parameter may lie differently; those are taken of which there are more bytes, and that lie on addresses
    that suit their type. page: its bytes. least: bytes of whole pages that a run has to have.
    """
    steps: dict[str, list[int]] = defaultdict(list)
    for number, step in enumerate(plan.steps):
        if step.parameter in wanted:
            steps[step.parameter].append(number)
    found = {}
    for name, numbers in steps.items():
        spec = plan.parameters[name]
        if sum(plan.steps[n].into.size for n in numbers) != prod(spec.shape):
            continue
        ways: dict[int, list[tuple[PlainRun, int]]] = defaultdict(list)
        for number in numbers:
            run = plain_run(plan, plan.steps[number])
            if run is None or run.length < least + 2 * page:
                continue
            if (begin := (run.start - run.at) % page) % spec.dtype.block_bytes == 0:
                ways[begin].append((run, number))
        if ways:
            begin, runs = max(ways.items(), key=lambda way: sum(run.length for run, _ in way[1]))
            found[name] = Paged(begin, tuple(run for run, _ in runs), tuple(number for _, number in runs))
    return found


def beginnings(plan: Plan, *, least: int) -> dict[str, int]:
    """Return by parameter which position in a file its first byte would have, were all of it as its longest plain run.

    Of parameters of fewer than `least` bytes, nothing. Negative where that run lies near the beginning of a file and
    goes far into the parameter.
    """
    longest: dict[str, PlainRun] = {}
    large = {name for name, spec in plan.parameters.items() if spec.dtype.nbytes(spec.shape) >= least}
    for step in plan.steps:
        run = plain_run(plan, step) if step.parameter in large else None
        if run is not None and (step.parameter not in longest or run.length > longest[step.parameter].length):
            longest[step.parameter] = run
    return {name: run.start - run.at for name, run in longest.items()}


def whole_runs(plan: Plan) -> dict[str, PlainRun]:
    """Return the parameters that are one plain run as a whole, with it."""
    steps: dict[str, list[Step]] = {}
    for step in plan.steps:
        steps.setdefault(step.parameter, []).append(step)
    found = {name: plain_run(plan, some[0]) for name, some in steps.items() if len(some) == 1}
    nbytes = {name: spec.dtype.nbytes(spec.shape) for name, spec in plan.parameters.items()}
    return {n: run for n, run in found.items() if run is not None and run.at == 0 and run.length == nbytes[n]}


def _extent(region: Region, dtype: DType) -> tuple[int, int] | None:
    """Return (first byte, bytes) of a region whose bytes are one run of those of its tensor; else None."""
    blocks = in_blocks(region, dtype)
    if blocks is None:
        return None
    strides = strides_of(blocks.view)
    first = sum(a * s for a, s in zip(blocks.box.start, strides, strict=True))
    last = sum((b - 1) * s for b, s in zip(blocks.box.stop, strides, strict=True))
    if last - first + 1 != blocks.size:
        return None
    return first * dtype.block_bytes, blocks.size * dtype.block_bytes
