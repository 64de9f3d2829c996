"""From staged bytes to parameters: the arithmetic that all executors share. Reads nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.dtypes import DType, Kind
from tensorferry.core.plan import Plan, Step
from tensorferry.core.schedule import Input, Piece, Task
from tensorferry.core.steps import is_packed
from tensorferry.core.transforms import Chain, Custom, TensorSpec
from tensorferry.errors import PlanError
from tensorferry.numerics.casts import Loss, copy_counting, fill
from tensorferry.numerics.compute import compute, compute_into
from tensorferry.numerics.memory import strided_view, view_region
from tensorferry.numerics.units import blocks_to_torch, to_torch

__all__ = [
    "Landing",
    "in_place",
    "interval_boxes",
    "landing",
    "perform",
    "plain_part",
    "refuse_unwritable",
    "region_of",
    "stays_on_cpu",
    "write",
]


def perform(plan: Plan, task: Task, staged: Sequence[torch.Tensor], parameter: torch.Tensor) -> Loss:
    """Do one task: turn its inputs into values and put them into `parameter`.

    staged: the bytes of the reads of the task's batch, uint8, on the CPU or on the device of `parameter`. Returns what
    a narrowing cast spoiled.
    """
    step = plan.steps[task.step]
    into = region_of(parameter, step.into, plan.parameters[step.parameter].dtype)
    if not task.inputs:
        fill(into, step.fill)
        return Loss()
    if step.via is not None:
        return _computed(step, task, staged, into)
    (only,) = task.inputs
    landed = _landing(step, into)
    return sum((landed.put(staged[piece.read], piece) for piece in only.pieces), Loss())


class Landing(NamedTuple):
    """Where the pieces of one input go that nothing is computed of.

    into: the part of the parameter, as a view. whole: the region of the source that it takes, in torch elements.
    dtype: of the source.
    """

    into: torch.Tensor
    whole: Region
    dtype: DType

    def put(self, staged: torch.Tensor, piece: Piece) -> Loss:
        """Put a piece, of which `staged` has the bytes, where it belongs; return what a narrowing cast spoiled."""
        values = strided_view(staged, piece.offset, self.dtype, piece.box.shape, piece.strides)
        return write(self.into, values, blocks_to_torch(piece.box, self.dtype), self.whole)


def landing(plan: Plan, task: Task, parameter: torch.Tensor) -> Landing:
    """Return where the pieces of a task go that computes nothing."""
    step = plan.steps[task.step]
    return _landing(step, region_of(parameter, step.into, plan.parameters[step.parameter].dtype))


def _landing(step: Step, into: torch.Tensor) -> Landing:
    entry, region = step.sources[0].entry, step.sources[0].region
    return Landing(into, to_torch(region, entry.dtype), entry.dtype)


def region_of(parameter: torch.Tensor, region: Region, dtype: DType) -> torch.Tensor:
    """Return the part `region` (in elements of `dtype`) of a parameter, as a view to write to."""
    return view_region(parameter, to_torch(region, dtype))


def refuse_unwritable(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanError where a strided tensor has no view that a step of `plan` could write to. Touches nothing."""
    for step in plan.steps:
        tensor = tensors.get(step.parameter)
        if tensor is None or tensor.is_contiguous():
            continue
        how = f"{step.parameter} has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        if tensor.device.type != "meta" and any(
            n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise PlanError(f"{how}: its elements share memory and cannot be filled one by one; make it contiguous")
        try:
            region_of(tensor.detach(), step.into, plan.parameters[step.parameter].dtype)
        except RuntimeError:
            part = f"its part {step.into.box.slices} of the view {step.into.view}"
            raise PlanError(f"{how}: {part} cannot be written to where it lies; make it contiguous") from None


def in_place(plan: Plan, task: Task, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the contiguous part of `parameter` that is, byte for byte, what the only piece of `task` holds.

    None where the bytes cannot simply be read there: another type, another device, strides, a transform, numbers that
    torch takes for their conjugates.
    """
    return plain_part(plan, task, parameter) if parameter.is_cpu else None


def plain_part(plan: Plan, task: Task, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return what `in_place` does, whatever device the parameter is on."""
    step, inputs = plan.steps[task.step], task.inputs
    if step.via is not None or len(inputs) != 1 or len(inputs[0].pieces) != 1:
        return None
    source, piece = step.sources[0], inputs[0].pieces[0]
    (entry, region), target = source, plan.parameters[step.parameter].dtype
    if entry.dtype is not target and entry.dtype != target:
        return None
    if target.kind is Kind.COMPLEX and parameter.is_conj():  # it says other numbers than lie there
        return None
    whole = piece.box is region.box and step.into is region and region.is_whole and target.block == 1
    if whole and parameter.shape == region.view:  # as most are
        return parameter if parameter.is_contiguous() and _row_major(region.view, piece.strides) else None
    if not _row_major(piece.box.shape, piece.strides):
        return None
    into = region_of(parameter, step.into, target)
    box = blocks_to_torch(piece.box, target).relative_to(to_torch(source.region, target).box)
    shape = to_torch(source.region, target).shape
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


@lru_cache(maxsize=1024)
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
        # Not all that is 1 in the values: a single row of many stays a row.
        return copy_counting(into.squeeze()[inner], values.squeeze(tuple(d for d, n in enumerate(shape) if n == 1)))
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
    if _travels_packed(step):
        parts = [part.to(into.device) for part in parts]
    window = to_torch(step.window, made.dtype)
    if step.window.view != made.shape:
        values = view_region(compute(step.via, parts, specs, Box.whole(made.shape)).contiguous(), window)
        return write(into, values, window.box, window)
    out = step.window.box if task.out is None else task.out.shift(step.window.box.start)
    box = to_torch(Region(made.shape, out), made.dtype).box
    if tuple(into.shape) == window.shape:
        return compute_into(step.via, parts, specs, out, into[box.relative_to(window.box).slices])
    return write(into, compute(step.via, parts, specs, out), box, window)


def _travels_packed(step: Step) -> bool:
    """Whether inputs go to the parameter's device as they are: packed bytes are fewer than the numbers made of them."""
    return is_packed([s.entry for s in step.sources]) and not stays_on_cpu(step)


def stays_on_cpu(step: Step) -> bool:
    """Whether a step runs a function that a caller brings: it gets tensors on the CPU, whatever device is used."""
    steps = step.via.steps if isinstance(step.via, Chain) else (step.via,)
    return any(isinstance(s, Custom) for s in steps)


def _assembled(part: Input, dtype: DType, staged: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one input as a tensor: a view of the staged bytes where one read brought it, else put together."""
    views = [(p.box, strided_view(staged[p.read], p.offset, dtype, p.box.shape, p.strides)) for p in part.pieces]
    if len(views) == 1 and views[0][0] == part.box:
        return views[0][1]
    shape = blocks_to_torch(part.box, dtype).shape
    some = views[0][1] if views else strided_view(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, dtype, (0,), (1,))
    out = torch.empty(shape, dtype=some.dtype, device=some.device)
    for box, values in views:
        out[blocks_to_torch(box, dtype).relative_to(blocks_to_torch(part.box, dtype)).slices] = values
    return out


def _squeezed(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)
