"""A tiny executor over numpy arrays, and the naive answer that it must give. Slow, and obviously right.

Values are counted in blocks of their dtype, so that packed types are opaque items of a few bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tensorferry.core.boxes import Box, Region, Shape, strides_of
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.cutting import in_blocks
from tensorferry.core.dtypes import DType, Kind
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.core.schedule import Input, Read, Schedule, Task
from tensorferry.core.transforms import Add, Chain, Concat, Stack, Take, Transform, Transpose

Array = NDArray[Any]

POISON = 0x5A
"""The byte that stands for what nothing wrote."""


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return integers for integer types, and for all others opaque items of one block."""
    if dtype.kind in (Kind.SIGNED, Kind.UNSIGNED):
        return np.dtype(f"<{'i' if dtype.kind is Kind.SIGNED else 'u'}{dtype.block_bytes}")
    return np.dtype(f"V{dtype.block_bytes}")


def poisoned(dtype: DType, shape: Shape) -> Array:
    """Return a tensor of `shape` (in elements) that nothing has written to yet."""
    blocks = _blocked(Region.whole(shape), dtype).view
    raw = np.full(prod(blocks) * dtype.block_bytes, POISON, dtype=np.uint8)
    return raw.view(numpy_dtype(dtype)).reshape(blocks)


def simulate(schedule: Schedule, files: Mapping[str, bytes]) -> dict[str, Array]:
    """Do every task of every batch, in order, and return the parameters."""
    out = {n: poisoned(s.dtype, s.shape) for n, s in schedule.plan.parameters.items()}
    for batch in schedule.batches:
        staged = [_staged(files[r.file], r) for r in batch.reads]
        assert sum(map(len, staged)) == batch.length <= batch.staging
        for task in batch.tasks:
            _perform(schedule.plan, task, staged, out)
    return out


def naive(plan: Plan, values: Mapping[str, Array]) -> dict[str, Array]:
    """Fill the parameters of `plan` from whole entries by plain indexing."""
    out = {n: poisoned(s.dtype, s.shape) for n, s in plan.parameters.items()}
    for step in plan.steps:
        dtype = plan.parameters[step.parameter].dtype
        where = positions(step.into, dtype)
        if not step.sources:
            out[step.parameter].reshape(-1)[where] = _fill(step, dtype)
            continue
        wholes = [values[s.entry.name] for s in step.sources]
        if step.via is None:
            found = taken(wholes[0], step.sources[0].region, step.sources[0].entry.dtype)
        else:
            assert step.window is not None
            found = taken(_applied(step, wholes), step.window, step.sources[0].entry.dtype)
        out[step.parameter].reshape(-1)[where.reshape(-1)] = found.reshape(-1)
    return out


def taken(whole: Array, region: Region, dtype: DType) -> Array:
    """Return `region` (in elements) of a tensor (in blocks)."""
    blocks = _blocked(region, dtype)
    return whole.reshape(blocks.view)[blocks.box.slices]


def positions(region: Region, dtype: DType) -> NDArray[np.int64]:
    """Return the row-major positions, in blocks, of everything in `region`, in its shape."""
    blocks = _blocked(region, dtype)
    every: NDArray[np.int64] = np.arange(prod(blocks.view), dtype=np.int64).reshape(blocks.view)
    return every[blocks.box.slices]


def bytes_needed(plan: Plan) -> set[tuple[str, int]]:
    """Return every byte, by file and offset, that the sources of `plan` are made of."""
    need: set[tuple[str, int]] = set()
    for step in plan.steps:
        for entry, region in step.sources if step.into.size else ():
            wanted = positions(region, entry.dtype).reshape(-1)
            size = entry.dtype.block_bytes
            for file, offsets in byte_offsets(entry):
                need |= {(file, int(o) + k) for o in offsets[wanted] if o >= 0 for k in range(size)}
    return need


def byte_offsets(entry: TensorEntry) -> list[tuple[str, NDArray[np.int64]]]:
    """Return, per chunk, the byte offset of every block of the entry in the chunk's file, or -1."""
    shape = _blocked(Region.whole(entry.shape), entry.dtype).view
    found = []
    for box, span, strides in entry.chunks:
        assert span is not None
        inner = _blocked(Region(entry.shape, box or Box.whole(entry.shape)), entry.dtype).box
        offsets = np.full(inner.shape, span.offset, dtype=np.int64)
        for d, step in enumerate(strides or strides_of(inner.shape)):
            line = np.arange(inner.shape[d]) * step * entry.dtype.block_bytes
            offsets += line.reshape([-1 if k == d else 1 for k in range(len(inner.shape))])
        at = np.full(shape, -1, dtype=np.int64)
        at[inner.slices] = offsets
        found.append((span.file, at.reshape(-1)))
    return found


def _applied(step: Step, wholes: Sequence[Array]) -> Array:
    """Compute the transform of a step; `Take` counts in elements, so its region and shape are put into blocks."""
    assert step.via is not None
    dtype = step.sources[0].entry.dtype
    if isinstance(step.via, Take):
        shape = _blocked(Region.whole(step.via.shape), dtype).view
        return taken(wholes[0], step.via.region, dtype).reshape(shape)
    return apply(step.via, wholes)


def apply(via: Transform, wholes: Sequence[Array]) -> Array:
    """Compute a transform of whole tensors."""
    match via:
        case Take(region, shape):
            return wholes[0].reshape(region.view)[region.box.slices].reshape(shape)
        case Transpose(dims):
            return wholes[0].transpose(dims)
        case Add(value):
            more: Array = np.add(wholes[0], wholes[0].dtype.type(value))
            return more
        case Stack(dim):
            return np.stack(wholes, dim)
        case Concat(dim):
            return np.concatenate(wholes, dim)
        case Chain(steps):
            made = list(wholes)
            for step in steps:
                made = [apply(step, made)]
            return made[0]
    raise AssertionError(f"the simulation does not know {via}")


def _staged(data: bytes, read: Read) -> Array:
    assert read.offset >= 0
    assert read.length > 0
    runs = list(read.runs)
    assert sum(length for _, length in runs) == read.length
    assert sum(runs[-1]) <= len(data), "a read leaves its file"
    return np.concatenate([np.frombuffer(data, np.uint8, length, offset) for offset, length in runs])


def _perform(plan: Plan, task: Task, staged: Sequence[Array], out: Mapping[str, Array]) -> None:
    step = plan.steps[task.step]
    dtype = plan.parameters[step.parameter].dtype
    where = positions(step.into, dtype)
    if not step.sources:
        out[step.parameter].reshape(-1)[where] = _fill(step, dtype)
        return
    if not task.inputs:
        assert where.size == 0, "a task without inputs leaves something unwritten"
        return
    wholes = [_filled_in(step.sources[i.source], i, staged) for i in task.inputs]
    first, part = step.sources[0], task.out
    if step.via is None:
        found = taken(wholes[0], first.region, first.entry.dtype)
    else:
        assert step.window is not None
        found = taken(_applied(step, wholes), step.window, first.entry.dtype)
        part = part and _blocked(Region(step.window.shape, part), first.entry.dtype).box
    slices = () if part is None else part.slices
    out[step.parameter].reshape(-1)[where.reshape(found.shape)[slices]] = found[slices]


def _filled_in(source: Source, part: Input, staged: Sequence[Array]) -> Array:
    """Return the whole entry, poisoned but for what the pieces bring."""
    entry = source.entry
    whole = poisoned(entry.dtype, entry.shape)
    size = entry.dtype.block_bytes
    view = _blocked(source.region, entry.dtype).view
    for read, offset, strides, box in part.pieces:
        steps = [s * size for s in strides]
        last = offset + size + sum((n - 1) * s for n, s in zip(box.shape, steps, strict=True))
        assert offset >= 0
        assert last <= len(staged[read]), "a piece leaves its read"
        items = staged[read][offset : offset + size].view(whole.dtype)
        values = as_strided(items, box.shape, steps, writeable=False)
        where = np.arange(whole.size).reshape(view)[box.slices]
        whole.reshape(-1)[where] = values
    return whole


def _fill(step: Step, dtype: DType) -> Any:
    assert step.fill is not None
    return numpy_dtype(dtype).type(step.fill)


def _blocked(region: Region, dtype: DType) -> Region:
    blocks = in_blocks(region, dtype)
    assert blocks is not None
    return blocks
