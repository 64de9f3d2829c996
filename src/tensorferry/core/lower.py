"""From a plan to a schedule: boxes become reads and batches, by one cost rule, under a memory bound. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.catalogue import Chunk, TensorEntry
from tensorferry.core.cost import ReadCost
from tensorferry.core.cutting import cut, in_blocks
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.core.schedule import Batch, Input, Piece, Read, Schedule, Task
from tensorferry.core.transforms import TensorSpec, Transform
from tensorferry.errors import PlanError

__all__ = ["lower"]


class _Range(NamedTuple):
    """Bytes that some input of some task needs, before neighbours are joined. Runs are as in `Read`."""

    file: str
    offset: int
    length: int
    needed: int
    times: int
    stride: int
    source: int
    strides: Shape
    box: Box


class _Work(NamedTuple):
    """A task whose ranges are known but not yet put into reads."""

    step: int
    out: Box | None
    boxes: tuple[Box, ...]
    ranges: tuple[_Range, ...]


def lower(plan: Plan, *, max_gap: int, max_read: int, max_staging: int, waste: float) -> Schedule:
    """Return the reads that `plan` needs, in the order of the files and of the bytes in them.

    max_gap, max_read, max_staging: bytes; waste: most bytes read for each byte needed. Neighbouring ranges
    become one read where the hole between them is at most `max_gap` and the read stays within `max_read` and
    `waste`. A batch never stages more than `max_staging` unless a single task needs more and cannot be cut.
    """
    cost = ReadCost(max_gap, min(max_read, max_staging), waste)
    files = _file_order(plan)
    unread: list[Task] = []
    works: list[_Work] = []
    for number, step in enumerate(plan.steps):
        if not step.sources or not step.into.size:
            unread.append(Task(number, None, ()))
            continue
        for work in _works(number, step, cost):
            if work.ranges:
                works.append(work)
            else:
                unread.append(_task(work, (), {}))
    works.sort(key=lambda w: (files[w.ranges[0].file], w.ranges[0].offset))
    first = [Batch((), tuple(unread), 0)] if unread else []
    return Schedule(plan, (*first, *_batches(works, cost, max_staging)), max_staging)


def _file_order(plan: Plan) -> dict[str, int]:
    order: dict[str, int] = {}
    for step in plan.steps:
        for source in step.sources:
            for chunk in source.entry.chunks:
                if chunk.span is None:
                    raise PlanError(
                        f"{source.entry.name}: its bytes are no span of a file, so they cannot be scheduled"
                    )
                order.setdefault(chunk.span.file, len(order))
    return order


def _works(number: int, step: Step, cost: ReadCost) -> Iterator[_Work]:
    if step.via is not None:
        yield from _computed(number, step, cost)
        return
    (source,) = step.sources
    region = _blocks_of(source.entry, source.region)
    for piece in _ranges(0, source.entry, region, cost):
        yield _Work(number, piece.box.relative_to(region.box), (piece.box,), (piece,))


def _computed(number: int, step: Step, cost: ReadCost) -> Iterator[_Work]:
    assert step.via is not None
    assert step.window is not None
    specs = [TensorSpec(s.entry.dtype, s.entry.shape) for s in step.sources]
    window, made = step.window, step.via.infer(specs).shape
    whole = [s.region.box for s in step.sources]
    outs = [window.box]
    if window.view == made and _nbytes(specs, whole) > cost.max_read:
        outs = _rows(step.via, window, specs, _nbytes(specs, whole), cost)
    for out in outs:
        boxes = whole if out == window.box else step.via.pull(out, specs)
        yield _gather(number, step.sources, boxes, out.relative_to(window.box), cost)


def _rows(via: Transform, window: Region, specs: Sequence[TensorSpec], total: int, cost: ReadCost) -> list[Box]:
    """Cut an output so that each part needs about a read's worth of input; not at all where that saves nothing."""
    dim = next((d for d, n in enumerate(window.shape) if n > 1), 0)
    block = max(s.dtype.block for s in specs) if dim == len(window.shape) - 1 else 1
    rows = window.shape[dim] * cost.max_read // total if window.shape else 1
    outs = list(window.box.rows(max(block, rows - rows % block)))
    return outs if _nbytes(specs, via.pull(outs[0], specs)) < total else [window.box]


def _gather(number: int, sources: Sequence[Source], boxes: Sequence[Box], out: Box, cost: ReadCost) -> _Work:
    ranges: list[_Range] = []
    blocks: list[Box] = []
    for i, (source, box) in enumerate(zip(sources, boxes, strict=True)):
        region = _blocks_of(source.entry, Region(source.entry.shape, box))
        blocks.append(region.box)
        ranges += _ranges(i, source.entry, region, cost)
    return _Work(number, out, tuple(blocks), tuple(ranges))


def _nbytes(specs: Sequence[TensorSpec], boxes: Sequence[Box]) -> int:
    return sum(spec.dtype.nbytes(box.shape) for spec, box in zip(specs, boxes, strict=True))


def _blocks_of(entry: TensorEntry, region: Region) -> Region:
    blocks = in_blocks(region, entry.dtype)
    if blocks is None:
        n = entry.dtype.block
        raise PlanError(f"{entry.name}: {region.box} cuts through a block of {n} {entry.dtype} elements")
    return blocks


def _ranges(source: int, entry: TensorEntry, region: Region, cost: ReadCost) -> Iterator[_Range]:
    """Yield the bytes of `region`, which is counted in blocks, as are the boxes that come back."""
    for chunk in entry.chunks:
        if chunk.box is None or len(entry.chunks) == 1:
            yield from _of_chunk(source, entry, chunk, region, None, cost)
            continue
        box = _blocks_of(entry, Region(entry.shape, chunk.box)).box
        common = box.meet(region.box)
        if common is not None:
            yield from _of_chunk(source, entry, chunk, Region(box.shape, common.relative_to(box)), box.start, cost)


def _of_chunk(
    source: int, entry: TensorEntry, chunk: Chunk, region: Region, origin: Shape | None, cost: ReadCost
) -> Iterator[_Range]:
    assert chunk.span is not None
    file, base, _ = chunk.span
    for box, offset, length, needed, strides, times, stride in cut(
        region, entry.dtype.block_bytes, cost, chunk.strides
    ):
        at = box if origin is None else box.shift(origin)
        yield _Range(file, base + offset, length, needed, times, stride, source, strides, at)


def _batches(works: Sequence[_Work], cost: ReadCost, max_staging: int) -> Iterator[Batch]:
    """Group works that follow each other until a batch is as large as a read may be."""
    group: list[_Work] = []
    size = 0
    for work in works:
        more = sum(r.length for r in work.ranges)
        if group and size + more > cost.max_read:
            yield from _bounded(group, cost, max_staging)
            group, size = [], 0
        group.append(work)
        size += more
    if group:
        yield from _bounded(group, cost, max_staging)


def _bounded(works: Sequence[_Work], cost: ReadCost, max_staging: int) -> Iterator[Batch]:
    """Make one batch, or several where the holes that its reads run over would take it past the bound."""
    batch = _batch(works, cost)
    if batch.staging <= max_staging or len(works) == 1:
        yield batch
        return
    half = len(works) // 2
    yield from _bounded(works[:half], cost, max_staging)
    yield from _bounded(works[half:], cost, max_staging)


def _batch(works: Sequence[_Work], cost: ReadCost) -> Batch:
    reads: list[Read] = []
    where: dict[Sequence[object], int] = {}
    used = 0
    for key in sorted({r[:6] for w in works for r in w.ranges}):
        file, offset, length, needed, times, stride = key
        longer = _joined(reads[-1], used, key, cost) if reads else None
        if longer is None:
            reads.append(Read(file, offset, length, times, stride))
            used = needed
        else:
            reads[-1] = longer
            used += needed
        where[key] = len(reads) - 1
    tasks = tuple(_task(w, reads, where) for w in works)
    return Batch(tuple(reads), tasks, sum(r.length for r in reads))


def _joined(last: Read, used: int, more: tuple[str, int, int, int, int, int], cost: ReadCost) -> Read | None:
    """Return the read that brings what `last` does, of which `used` bytes are needed, and a range that begins later."""
    file, offset, length, needed, times, _ = more
    if file != last.file or times > 1 or last.times > 1:
        return None
    end = max(last.offset + last.length, offset + length)
    gap = offset - (last.offset + last.length)
    whole = end - last.offset
    if whole > max(cost.max_read, last.length) or not cost.joins(gap, whole, used + needed):
        return None
    return Read(file, last.offset, whole)


def _task(work: _Work, reads: Sequence[Read], where: Mapping[Sequence[object], int]) -> Task:
    pieces: list[list[Piece]] = [[] for _ in work.boxes]
    for r in work.ranges:
        n = where[r[:6]]
        pieces[r.source].append(Piece(n, r.offset - reads[n].offset, r.strides, r.box))
    inputs = tuple(Input(i, box, tuple(p)) for i, (box, p) in enumerate(zip(work.boxes, pieces, strict=True)))
    return Task(work.step, work.out, inputs)
