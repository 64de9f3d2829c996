"""From a plan to a schedule: boxes become reads and batches, by one cost rule, under a memory bound. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from tensorferry.core.batching import Range, Work, batches, task_of
from tensorferry.core.boxes import Box, Region, Shape, strides_of
from tensorferry.core.catalogue import Chunk, TensorEntry
from tensorferry.core.cost import ReadCost
from tensorferry.core.cutting import cut, in_blocks
from tensorferry.core.dtypes import DType
from tensorferry.core.plan import Plan, Step
from tensorferry.core.schedule import Batch, Schedule, Task
from tensorferry.core.transforms import TensorSpec, Transform
from tensorferry.core.workspace import workspace
from tensorferry.errors import PlanError

__all__ = ["lower"]


def lower(plan: Plan, *, max_gap: int, max_read: int, max_staging: int, waste: float) -> Schedule:
    """Return the reads that `plan` needs, in the order of the files and of the bytes in them, modules kept together.

    max_gap, max_read, max_staging: bytes; waste: most bytes read for each byte needed. Neighbouring ranges
    become one read where the hole between them is at most `max_gap` and the read stays within `max_read` and
    `waste`; the runs of a slice whose holes are wider are one read without them. A batch never takes more than
    `max_staging`, what computing takes included, unless a single task needs more and cannot be cut.
    """
    cost = ReadCost(max_gap, min(max_read, max_staging), waste)
    files = _file_order(plan)
    unread: list[Task] = []
    works: list[Work] = []
    for number, step in enumerate(plan.steps):
        dtype = plan.parameters[step.parameter].dtype
        if (whole := whole_entry(number, step, dtype, cost)) is not None:
            works.append(whole)
            continue
        if not step.sources or not step.into.size:
            unread.append(Task(number, None, ()))
            continue
        for work in _works(number, step, dtype, cost):
            if work.ranges:
                works.append(work)
            else:
                unread.append(task_of(work, (), {}))
    first = [Batch((), tuple(unread), 0)] if unread else []
    return Schedule(plan, (*first, *batches(works, files, cost, max_staging)), max_staging)


def _file_order(plan: Plan) -> dict[str, int]:
    order: dict[str, int] = {}
    for step in plan.steps:
        for source in step.sources:
            if source.entry.made is not None and not source.entry.chunks:
                raise PlanError(
                    f"{source.entry.name}: is made of other entries; a step over it is to be resolved first"
                )
            for chunk in source.entry.chunks:
                if chunk.span is None:
                    raise PlanError(
                        f"{source.entry.name}: its bytes are no span of a file, so they cannot be scheduled"
                    )
                order.setdefault(chunk.span.file, len(order))
    return order


def whole_entry(number: int, step: Step, dtype: DType, cost: ReadCost) -> Work | None:
    """Return the work of a step that takes all of an entry, as it lies, in one read: what most steps do.

    None for all others. Equal to what comes of cutting the entry; found sooner.
    """
    if step.via is not None or not step.sources:
        return None
    entry, region = step.sources[0]
    if entry.dtype.block > 1 or region.view != entry.shape or not region.is_whole:
        return None
    span, (length, strides) = entry.span, _laid_out(entry.shape, entry.dtype.block_bytes)
    if span is None or not 0 < length <= cost.max_read:
        return None
    box, plain = region.box, entry.dtype is dtype or entry.dtype == dtype
    room = 0 if plain or not span.offset % entry.dtype.block_bytes else length
    only = Range(span.file, span.offset, length, length, 1, 0, 0, strides, box)
    return Work(step.parameter.rpartition(".")[0], number, box, (box,), (only,), plain, room)


@lru_cache(maxsize=1024)
def _laid_out(shape: Shape, unit: int) -> tuple[int, Shape]:
    """Return the bytes of a tensor whose elements take `unit` bytes, and its strides."""
    return prod(shape) * unit, strides_of(shape)


def _works(number: int, step: Step, dtype: DType, cost: ReadCost) -> Iterator[Work]:
    if step.via is not None:
        yield from _computed(number, step, cost)
        return
    (source,) = step.sources
    found = source.entry.dtype
    region = _blocks_of(source.entry, source.region)
    module, unit = step.parameter.rpartition(".")[0], _alignment(found)
    for piece in _ranges(0, source.entry, region, cost):
        plain = found == dtype and piece.length == piece.needed
        room = 0 if plain or not piece.offset % unit else piece.length
        box = piece.box.relative_to(region.box)
        yield Work(module, number, box, (piece.box,), (piece,), plain, room)


def _computed(number: int, step: Step, cost: ReadCost) -> Iterator[Work]:
    assert step.via is not None
    assert step.window is not None
    specs = [TensorSpec(s.entry.dtype, s.entry.shape) for s in step.sources]
    window, made = step.window, step.via.infer(specs).shape
    whole = [s.region.box for s in step.sources]
    outs = [window.box]
    taken = _nbytes(specs, whole) + workspace(step, specs, whole, window.box)
    if window.view == made and taken > cost.max_read:
        outs = _rows(step.via, window, specs, taken, cost)
    for out in outs:
        boxes = whole if out == window.box else step.via.pull(out, specs)
        yield _gather(number, step, specs, boxes, out, cost)


def _rows(via: Transform, window: Region, specs: Sequence[TensorSpec], total: int, cost: ReadCost) -> list[Box]:
    """Cut an output so that each part takes about a read's worth of memory; not at all where that saves nothing."""
    dim = next((d for d, n in enumerate(window.shape) if n > 1), 0)
    block = max(s.dtype.block for s in specs) if dim == len(window.shape) - 1 else 1
    rows = window.shape[dim] * cost.max_read // total if window.shape else 1
    outs = list(window.box.rows(max(block, rows - rows % block)))
    less = _nbytes(specs, via.pull(outs[0], specs)) < _nbytes(specs, via.pull(window.box, specs))
    return outs if less else [window.box]


def _gather(
    number: int, step: Step, specs: Sequence[TensorSpec], boxes: Sequence[Box], out: Box, cost: ReadCost
) -> Work:
    assert step.window is not None
    ranges: list[Range] = []
    blocks: list[Box] = []
    room = workspace(step, specs, boxes, out)
    for i, (source, box) in enumerate(zip(step.sources, boxes, strict=True)):
        region = _blocks_of(source.entry, Region(source.entry.shape, box))
        blocks.append(region.box)
        found = list(_ranges(i, source.entry, region, cost))
        if len(found) > 1:  # put together first
            room += source.entry.dtype.nbytes(box.shape)
        room += sum(r.length for r in found if r.offset % _alignment(source.entry.dtype))
        ranges += found
    module, part = step.parameter.rpartition(".")[0], out.relative_to(step.window.box)
    return Work(module, number, part, tuple(blocks), tuple(ranges), False, room)


def _alignment(dtype: DType) -> int:
    """Return the bytes that a tensor of `dtype` begins at a multiple of; staged ones that do not are copied."""
    return dtype.block_bytes if dtype.block == 1 else 1


def _nbytes(specs: Sequence[TensorSpec], boxes: Sequence[Box]) -> int:
    return sum(spec.dtype.nbytes(box.shape) for spec, box in zip(specs, boxes, strict=True))


def _blocks_of(entry: TensorEntry, region: Region) -> Region:
    blocks = in_blocks(region, entry.dtype)
    if blocks is None:
        n = entry.dtype.block
        raise PlanError(f"{entry.name}: {region.box} cuts through a block of {n} {entry.dtype} elements")
    return blocks


def _ranges(source: int, entry: TensorEntry, region: Region, cost: ReadCost) -> Iterator[Range]:
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
) -> Iterator[Range]:
    assert chunk.span is not None
    file, base, _ = chunk.span
    for box, offset, length, needed, strides, times, stride in cut(
        region, entry.dtype.block_bytes, cost, chunk.strides
    ):
        at = box if origin is None else box.shift(origin)
        yield Range(file, base + offset, length, needed, times, stride, source, strides, at)
