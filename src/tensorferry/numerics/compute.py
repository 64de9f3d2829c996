"""How transforms compute: from the parts of the inputs that `Transform.pull` asked for to a part of the output."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.dtypes import Kind
from tensorferry.core.making import Assemble, Each, Scale
from tensorferry.core.transforms import (
    Add,
    Chain,
    Concat,
    Custom,
    Dequantize,
    Permute,
    Stack,
    Take,
    TensorSpec,
    Transform,
    Transpose,
)
from tensorferry.errors import PlanError
from tensorferry.numerics.casts import Loss, copy_counting
from tensorferry.numerics.dequantize import decode_into, dequantize
from tensorferry.numerics.memory import view_region
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape
from tensorferry.numerics.units import to_torch

__all__ = ["compute", "compute_into", "compute_whole"]

_AT_ONCE = 1 << 18
"""Elements of which products are made before they are put where they belong: 1 MiB of them."""


def compute(transform: Transform, parts: Sequence[torch.Tensor], specs: Sequence[TensorSpec], out: Box) -> torch.Tensor:
    """Return the part `out` of the output of `transform`.

    parts: for each input, the part that ``transform.pull(out, specs)`` names. specs: of the whole inputs.
    The result may alias an input. Arithmetic on floats of fewer than 32 bits is done in float32 and left there,
    so that the copy into the parameter rounds once.
    """
    match transform:
        case Take():
            return _taken(transform, parts[0], specs[0], out)
        case Transpose(dims):
            return parts[0].permute(dims)
        case Permute(view, dims):
            (box,) = transform.pull(out, specs)
            part = to_torch(Region(box.shape, out.relative_to(box)), specs[0].dtype).box
            return _permuted(parts[0], specs[0], view, dims)[part.slices]
        case Dequantize():
            (box,) = transform.pull(out, specs)
            return dequantize(specs[0].dtype, parts[0])[out.relative_to(box).slices]
        case Add(value):
            if parts[0].element_size() < 4:
                return parts[0].to(torch.float32).add_(value)
            return parts[0] + value
        case Chain(steps):
            return _chain(steps, parts, specs, out)
        case Custom(name, _, function):
            if function is None:
                raise PlanError(f"the function {name!r} of this plan is not part of its JSON: make the plan again")
            result: torch.Tensor = function(parts)
            return result[out.slices]
        case _:
            return _joined(transform, parts, specs, out)


def _joined(transform: Transform, parts: Sequence[torch.Tensor], specs: Sequence[TensorSpec], out: Box) -> torch.Tensor:
    """Return what `compute` does, for transforms of several inputs."""
    match transform:
        case Stack(dim):
            there = [p for p in parts if p.numel()] or list(parts[:1])
            return there[0].unsqueeze(dim) if len(there) == 1 else torch.stack(there, dim)
        case Concat(dim):
            there = [p for p in parts if p.numel()]
            return there[0] if len(there) == 1 else torch.cat(list(parts), dim)
        case Scale():
            return _scaled(transform, parts, specs, out)
        case Each():
            return _each(transform, parts, specs, out)
        case Assemble():
            return _assembled(transform, parts, specs)[out.slices]
        case _:
            raise PlanError(f"nothing here computes the transform {transform.op!r}")


def compute_whole(transform: Transform, wholes: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> torch.Tensor:
    """Return the whole output of `transform` from its whole inputs."""
    out = Box.whole(transform.infer(specs).shape)
    boxes = [to_torch(Region(s.shape, b), s.dtype).box for s, b in zip(specs, transform.pull(out, specs), strict=True)]
    parts = [w if b.shape == tuple(w.shape) else w[b.slices] for w, b in zip(wholes, boxes, strict=True)]
    return compute(transform, parts, specs, out)


def _taken(take: Take, part: torch.Tensor, spec: TensorSpec, out: Box) -> torch.Tensor:
    """Return what `out` is of a part that holds just that, or of the whole entry."""
    if take.part(out, spec) is not None:
        return part.reshape(out.shape)
    taken = view_region(part.contiguous(), to_torch(take.region, spec.dtype))
    whole = to_torch(Region(take.shape, out), spec.dtype)
    return taken.reshape(whole.view)[whole.box.slices]


def _permuted(part: torch.Tensor, spec: TensorSpec, view: Shape, dims: Sequence[int]) -> torch.Tensor:
    """Permute rows of a part that is whole groups of them; the last dimension may be packed."""
    groups = view[0] if tuple(part.shape) == spec.shape else view[0] * part.shape[0] // spec.shape[0]
    return part.reshape(groups, *view[1:-1], -1).permute(*dims).reshape(part.shape)


def _scaled(transform: Scale, parts: Sequence[torch.Tensor], specs: Sequence[TensorSpec], out: Box) -> torch.Tensor:
    numbers, factors = parts[0], parts[1].to(torch.float32)
    if specs[0].dtype.kind is Kind.PACKED:
        (box, _) = transform.pull(out, specs)
        numbers = dequantize(specs[0].dtype, numbers)[out.relative_to(box).slices]
    if factors.numel() == 1:
        return numbers.to(torch.float32) * factors.reshape(())
    return numbers.to(torch.float32) * factors.view(-1, *(1 for _ in numbers.shape[1:]))


def _scaled_into(
    transform: Scale, parts: Sequence[torch.Tensor], specs: Sequence[TensorSpec], out: Box, into: torch.Tensor
) -> Loss:
    """Put products into `into` some rows at a time, so that float32 numbers of all of them are never there."""
    dim = next((d for d, n in enumerate(out.shape) if n > 1), 0)
    if dim >= len(out.shape) - 1 or transform.pull(out, specs)[0] != out:
        return copy_counting(into, _scaled(transform, parts, specs, out))
    loss, rows = Loss(), max(1, _AT_ONCE * out.shape[dim] // out.size)
    for box in out.rows(rows):
        at, count = box.start[dim] - out.start[dim], box.shape[dim]
        factors = parts[1] if dim or parts[1].numel() == 1 else parts[1].narrow(0, at, count)
        made = _scaled(transform, [parts[0].narrow(dim, at, count), factors], specs, box)
        loss += copy_counting(into.narrow(dim, at, count), made)
    return loss


def _each(each: Each, parts: Sequence[torch.Tensor], specs: Sequence[TensorSpec], out: Box) -> torch.Tensor:
    made = each.specs(specs)
    boxes = each.then.pull(out, made)
    groups = zip(each.made, each.groups(parts), each.groups(specs), boxes, made, strict=True)
    values = [_one(via, some, of, box, spec) for (_, via), some, of, box, spec in groups]
    return compute(each.then, values, made, out)


def _one(
    via: Transform | None, parts: Sequence[torch.Tensor], specs: Sequence[TensorSpec], box: Box, made: TensorSpec
) -> torch.Tensor:
    if via is None:
        return parts[0]
    if not box.size:
        return parts[0].new_empty(torch_shape(made.dtype, box.shape), dtype=torch_dtype(made.dtype))
    return compute(via, parts, specs, box)


def _assembled(how: Assemble, parts: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> torch.Tensor:
    out = torch.empty(how.output.shape, dtype=torch_dtype(how.output.dtype), device=parts[0].device)
    for (window, into), part, spec in zip(how.pieces, parts, specs, strict=True):
        if window.view != spec.shape:
            part = view_region(part.contiguous(), to_torch(window, spec.dtype))
        values, place = part, view_region(out, into)
        place.copy_(values.reshape(place.shape))
    return out


def compute_into(
    transform: Transform, parts: Sequence[torch.Tensor], specs: Sequence[TensorSpec], out: Box, into: torch.Tensor
) -> Loss:
    """Compute the part `out` of the output of `transform` into `into`, which has its shape; return what casts spoiled.

    The arguments are those of `compute`. What only moves elements moves each of them once, and takes no memory.
    """
    match transform:
        case Transpose(dims):
            return copy_counting(into.permute(_undone(dims)), parts[0])
        case Stack(dim):
            there = [p for p in parts if p.numel()]
            return sum((copy_counting(into.select(dim, i), p) for i, p in enumerate(there)), Loss())
        case Concat(dim):
            lengths = [p.shape[dim] for p in parts]
            starts = [sum(lengths[:i]) for i in range(len(parts))]
            places = (into.narrow(dim, a, n) for a, n in zip(starts, lengths, strict=True))
            return sum((copy_counting(place, p) for place, p in zip(places, parts, strict=True)), Loss())
        case Dequantize() if list(transform.pull(out, specs)) == [out]:
            return decode_into(specs[0].dtype, parts[0], into)
        case Scale():
            return _scaled_into(transform, parts, specs, out, into)
        case Chain((only,)):
            return compute_into(only, parts, specs, out, into)
        case Chain((*before, Transpose(dims) as last)):
            chain = Chain(tuple(before))
            (inner,) = last.pull(out, [chain.infer(specs)])
            return compute_into(chain, parts, specs, inner, into.permute(_undone(dims)))
        case Chain((*before, Dequantize() as last)):
            chain = Chain(tuple(before))
            made = chain.infer(specs)
            (inner,) = last.pull(out, [made])
            return compute_into(last, [compute(chain, parts, specs, inner)], [made], out, into)
        case _:
            return copy_counting(into, compute(transform, parts, specs, out))


def _undone(dims: Sequence[int]) -> list[int]:
    return [list(dims).index(d) for d in range(len(dims))]


def _chain(
    steps: Sequence[Transform], parts: Sequence[torch.Tensor], specs: Sequence[TensorSpec], out: Box
) -> torch.Tensor:
    seen = [specs]
    for step in steps[:-1]:
        seen.append([step.infer(seen[-1])])
    outs = [out]
    for step, inputs in zip(reversed(steps[1:]), reversed(seen[1:]), strict=True):
        outs.append(step.pull(outs[-1], inputs)[0])
    for step, inputs, part in zip(steps, seen, reversed(outs), strict=True):
        parts = [compute(step, parts, inputs, part)]
    return parts[0]
