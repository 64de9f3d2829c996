"""How much memory computing a part of an output takes beside what is staged for it. Pure: sizes only, nothing is made.

`numerics.compute` is what takes it; where that learns to do with less, the numbers here follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tensorferry.core.boxes import Box
from tensorferry.core.dtypes import Kind
from tensorferry.core.making import Each, Scale
from tensorferry.core.plan import Step
from tensorferry.core.transforms import (
    Add,
    Chain,
    Concat,
    Custom,
    Dequantize,
    Permute,
    Stack,
    TensorSpec,
    Transform,
    Transpose,
)

__all__ = ["workspace"]

_FLOAT = 4
_SCALED_AT_ONCE = 2 * _FLOAT << 18
"""Bytes of the float32 numbers and products that multiplying has at a time."""


def workspace(step: Step, specs: Sequence[TensorSpec], boxes: Sequence[Box], out: Box) -> int:
    """Return the most bytes that making the part `out` (in elements) of the output of a step takes beside its inputs.

    specs: of the whole inputs. boxes: which parts of them are there. Of a `Custom` function no more is known than the
    size of what it returns.
    """
    assert step.via is not None
    assert step.window is not None
    made = step.via.infer(specs)
    if step.window.view == made.shape:
        return _straight(step.via, specs, boxes, out)
    whole = Box.whole(made.shape)
    return _made(step.via, specs, boxes, whole) + _numbers(made, whole)  # made whole, then taken apart


def _straight(via: Transform, specs: Sequence[TensorSpec], boxes: Sequence[Box], out: Box) -> int:
    """Return what is taken where the output goes straight to its place: what only moves elements needs nothing."""
    match via:
        case Transpose() | Stack() | Concat():
            return 0
        case Dequantize() if boxes[0] == out:
            return 0
        case Scale() if boxes[0] == out:
            return min(2 * _FLOAT * out.size, _SCALED_AT_ONCE)
        case Chain((only,)):
            return _straight(only, specs, boxes, out)
        case Chain((*before, Transpose() | Dequantize() as last)):
            chain = Chain(tuple(before))
            (inner,) = last.pull(out, [chain.infer(specs)])
            return _made(chain, specs, boxes, inner)
        case _:
            return _made(via, specs, boxes, out)


def _made(via: Transform, specs: Sequence[TensorSpec], boxes: Sequence[Box], out: Box) -> int:
    """Return what is taken where the output is made in memory of its own first."""
    made = via.infer(specs)
    match via:
        case Transpose():
            return 0
        case Dequantize():
            return _FLOAT * boxes[0].size
        case Scale():
            return 2 * _FLOAT * boxes[0].size
        case Custom():
            return _numbers(made, Box.whole(made.shape))
        case Add():
            return _numbers(made, out)
        case Stack() | Concat():
            return _stored(made, out) if sum(box.size > 0 for box in boxes) > 1 else 0
        case Permute():
            return _stored(made, out)
        case Each():
            return _numbers(made, out) + sum(
                0 if one is None else _made(one, some, parts, box)
                for (_, one), some, parts, box in zip(
                    via.made, via.groups(specs), via.groups(boxes), via.then.pull(out, via.specs(specs)), strict=True
                )
            )
        case Chain(steps):
            return _chained(steps, specs, boxes, out)
        case _:
            return _numbers(made, out) + sum(_stored(s, b) for s, b in zip(specs, boxes, strict=True))


def _chained(steps: Sequence[Transform], specs: Sequence[TensorSpec], boxes: Sequence[Box], out: Box) -> int:
    """Return the most of what one step takes together with the outcome of the one before it."""
    seen = [list(specs)]
    for step in steps:
        seen.append([step.infer(seen[-1])])
    wanted = [[out]]
    for step, inputs in zip(reversed(steps[1:]), reversed(seen[1:-1]), strict=True):
        wanted.append(list(step.pull(wanted[-1][0], inputs)))
    parts: Sequence[Box] = boxes
    held, most = 0, 0
    for step, inputs, (box,) in zip(steps, seen[:-1], reversed(wanted), strict=True):
        taken = _made(step, inputs, parts, box)
        most, held, parts = max(most, held + taken), max(taken, held), [box]
    return most


def _numbers(made: TensorSpec, box: Box) -> int:
    """Return the bytes of a result: arithmetic on floats is done in float32 and left there."""
    small = made.dtype.kind is Kind.FLOAT and made.dtype.block_bytes < _FLOAT
    return _FLOAT * box.size if small else _stored(made, box)


def _stored(spec: TensorSpec, box: Box) -> int:
    return -(-prod(box.shape) // spec.dtype.block) * spec.dtype.block_bytes
