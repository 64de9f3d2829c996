"""From staged bytes to parameters: the arithmetic that all executors share. Reads nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.cutting import in_blocks
from tensorferry.core.dtypes import DType
from tensorferry.core.plan import Plan, Step
from tensorferry.core.schedule import Input, Task
from tensorferry.core.transforms import TensorSpec
from tensorferry.numerics.casts import Loss, copy_counting
from tensorferry.numerics.compute import compute
from tensorferry.numerics.memory import strided_view, view_region
from tensorferry.numerics.torch_dtypes import torch_elements, torch_shape

__all__ = ["in_place", "interval_boxes", "perform", "region_of", "write"]


def perform(plan: Plan, task: Task, staged: Sequence[torch.Tensor], parameter: torch.Tensor) -> Loss:
    """Do one task: turn its inputs into values and put them into `parameter`.

    staged: the bytes of the reads of the task's batch, uint8. Returns what a narrowing cast spoiled.
    """
    step = plan.steps[task.step]
    into = region_of(parameter, step.into, plan.parameters[step.parameter].dtype)
    if not task.inputs:
        into.fill_(step.fill if step.fill is not None else 0)
        return Loss()
    if step.via is not None:
        return _computed(step, task, staged, into)
    (only,) = task.inputs
    dtype = step.sources[0].entry.dtype
    whole = step.sources[0].region
    loss = Loss()
    for piece in only.pieces:
        values = strided_view(staged[piece.read], piece.offset, dtype, piece.box.shape, piece.strides)
        loss += write(into, values, _in_elements(piece.box, dtype), _elements_region(whole, dtype))
    return loss


def region_of(parameter: torch.Tensor, region: Region, dtype: DType) -> torch.Tensor:
    """Return the part `region` (in elements of `dtype`) of a parameter, as a view to write to."""
    return view_region(parameter, _elements_region(region, dtype))


def in_place(plan: Plan, task: Task, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the contiguous part of `parameter` that is, byte for byte, what the only piece of `task` holds.

    None where the bytes cannot simply be read there: another type, another device, strides, a transform.
    """
    step = plan.steps[task.step]
    if step.via is not None or len(task.inputs) != 1 or len(task.inputs[0].pieces) != 1:
        return None
    source, piece = step.sources[0], task.inputs[0].pieces[0]
    target = plan.parameters[step.parameter].dtype
    if source.entry.dtype != target or parameter.device.type != "cpu" or not _row_major(piece.box.shape, piece.strides):
        return None
    into = region_of(parameter, step.into, target)
    box = _in_elements(piece.box, target).relative_to(_elements_region(source.region, target).box)
    shape = _elements_region(source.region, target).shape
    if tuple(into.shape) != shape:
        if _squeezed(tuple(into.shape)) != _squeezed(shape):
            return None
        into = into.view(shape) if into.is_contiguous() else into.squeeze()
    if into.dim() == len(shape):
        into = into[box.slices]
    else:
        kept = (slice(box.start[d], box.stop[d]) for d, n in enumerate(shape) if n != 1)
        into = into[tuple(kept)]
    return into if into.is_contiguous() else None


def _row_major(shape: Shape, strides: Shape) -> bool:
    step = 1
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and s != step:
            return False
        step *= n
    return True


def write(into: torch.Tensor, values: torch.Tensor, box: Box, whole: Region) -> Loss:
    """Copy `values`, which are `box` of the region `whole`, to where they belong in `into`.

    `into` has as many elements as `whole`, in the same row-major order, and possibly another shape. Both are
    counted in torch elements.
    """
    box = box.relative_to(whole.box)
    shape = whole.shape
    if tuple(into.shape) == shape:
        return copy_counting(into[box.slices], values)
    if _squeezed(tuple(into.shape)) == _squeezed(shape):
        kept = [d for d, n in enumerate(shape) if n != 1]
        inner = tuple(slice(box.start[d], box.stop[d]) for d in kept)
        return copy_counting(into.squeeze()[inner], values.squeeze() if values.dim() else values)
    return _write_interval(into, values, box, shape)


def _write_interval(into: torch.Tensor, values: torch.Tensor, box: Box, shape: Shape) -> Loss:
    first = sum(a * prod(shape[d + 1 :]) for d, a in enumerate(box.start))
    last = sum((b - 1) * prod(shape[d + 1 :]) for d, b in enumerate(box.stop)) + 1
    if last - first != values.numel():
        return _write_rows(into, values, box, shape)
    flat, loss = values.reshape(-1), Loss()
    for part, begin in interval_boxes(tuple(into.shape), first, last):
        loss += copy_counting(into[part.slices], flat[begin : begin + part.size].view(part.shape))
    return loss


def _write_rows(into: torch.Tensor, values: torch.Tensor, box: Box, shape: Shape) -> Loss:
    """A box that is no run of the order: one row after the other along its outermost dimension with an extent."""
    loss = Loss()
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    for at, row in enumerate(box.rows(1)):
        loss += _write_interval(into, values.narrow(dim, at, 1), row, shape)
    return loss


def interval_boxes(shape: Shape, first: int, last: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes of a tensor of `shape` that together are the row-major positions ``first <= p < last``.

    Each comes with the position, relative to `first`, at which it begins.
    """
    at = first
    while at < last:
        dim, inner = len(shape) - 1, 1
        while dim > 0 and at % (inner * shape[dim]) == 0 and at + inner * shape[dim] <= last:
            inner *= shape[dim]
            dim -= 1
        index, rest = [], at
        for d in range(len(shape)):
            step = prod(shape[d + 1 :])
            index.append(rest // step)
            rest %= step
        count = min(shape[dim] - index[dim], (last - at) // inner) if shape else 1
        stop = [i + 1 for i in index[:dim]] + [index[dim] + count, *shape[dim + 1 :]] if shape else []
        yield Box(tuple(index), tuple(stop)), at - first
        at += count * inner


def _computed(step: Step, task: Task, staged: Sequence[torch.Tensor], into: torch.Tensor) -> Loss:
    assert step.via is not None
    assert step.window is not None
    specs = [TensorSpec(s.entry.dtype, s.entry.shape) for s in step.sources]
    made = step.via.infer(specs)
    parts = [_assembled(i, step.sources[i.source].entry.dtype, staged) for i in task.inputs]
    whole = task.out is None or task.out.shape == step.window.shape
    if step.window.view == made.shape:
        out = step.window.box if task.out is None else task.out.shift(step.window.box.start)
        values = compute(step.via, parts, specs, out)
    else:
        made_whole = compute(step.via, parts, specs, Box.whole(made.shape))
        values = view_region(made_whole.contiguous(), step.window)
    box = Box.whole(tuple(values.shape)) if whole or task.out is None else task.out
    shape = tuple(values.shape) if whole else step.window.shape
    return write(into, values, box, Region.whole(shape))


def _assembled(part: Input, dtype: DType, staged: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one input as a tensor: a view of the staged bytes where one read brought it, else put together."""
    views = [(p.box, strided_view(staged[p.read], p.offset, dtype, p.box.shape, p.strides)) for p in part.pieces]
    if len(views) == 1 and views[0][0] == part.box:
        return views[0][1]
    shape = _in_elements(part.box, dtype).shape
    some = views[0][1] if views else strided_view(torch.empty(0, dtype=torch.uint8), 0, dtype, (0,), (1,))
    out = torch.empty(shape, dtype=some.dtype)
    for box, values in views:
        out[_in_elements(box, dtype).relative_to(_in_elements(part.box, dtype)).slices] = values
    return out


def _in_elements(box: Box, dtype: DType) -> Box:
    """Return a box counted in blocks as one counted in torch elements."""
    k = torch_elements(dtype)
    if k == 1 or not box.start:
        return box
    return Box((*box.start[:-1], box.start[-1] * k), (*box.stop[:-1], box.stop[-1] * k))


def _elements_region(region: Region, dtype: DType) -> Region:
    """Return a region counted in elements of `dtype` as one counted in torch elements."""
    if dtype.block == 1:
        return region
    blocks = in_blocks(region, dtype)
    if blocks is None:
        flat = torch_shape(dtype, region.view)
        return Region.whole(flat)
    k = torch_elements(dtype)
    view = (*blocks.view[:-1], blocks.view[-1] * k)
    return Region(view, _in_elements(blocks.box, dtype))


def _squeezed(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)
