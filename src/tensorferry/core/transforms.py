"""What may happen to values on the way from an entry to a parameter: a small closed vocabulary, and an escape.

Here a transform is only described: which shape comes out, and which parts of its inputs a part of its output
needs. `numerics` computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, Protocol, runtime_checkable

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.dtypes import DTYPES, DType, Kind, dtype_to_json

__all__ = [
    "Add", "Chain", "Concat", "Custom", "Dequantize", "Permute", "Stack", "Take", "TensorSpec", "Transform",
    "Transpose",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor without its values."""

    dtype: DType
    shape: Shape


@runtime_checkable
class Transform(Protocol):
    """A change of values. Immutable, hashable, comparable."""

    op: ClassVar[str]

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        """Return what comes out; raises ValueError saying why where the inputs do not fit."""
        ...

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        """Return, per input, the part that is needed to make the part `out` of the output."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return plain data from which `transform_from_json` makes an equal transform."""
        ...


def _single(inputs: Sequence[TensorSpec], op: str) -> TensorSpec:
    if len(inputs) != 1:
        raise ValueError(f"{op} takes one tensor, not {len(inputs)}")
    return inputs[0]


@dataclass(frozen=True, slots=True)
class Take:
    """Use only a part of the entry: a region of it, in the given shape. Moves no values; planning folds it away."""

    op: ClassVar[str] = "take"
    region: Region
    shape: Shape

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        spec = _single(inputs, self.op)
        if not self.region.fits(spec.shape) or self.region.size != Region.whole(self.shape).size:
            raise ValueError(f"takes {self.region.box} of the view {self.region.view}, but the entry is {spec.shape}")
        return TensorSpec(spec.dtype, self.shape)

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        return [self.part(out, inputs[0]) or Box.whole(inputs[0].shape)]

    def part(self, out: Box, entry: TensorSpec) -> Box | None:
        """Return the box of the entry that holds just the elements of `out`; None where it is not known to be a box."""
        box = self.region.box
        taken = [d for d, n in enumerate(box.shape) if n != 1]
        made = [d for d, n in enumerate(self.shape) if n != 1]
        extents = [box.shape[d] for d in taken] == [self.shape[d] for d in made]
        if not extents or not out.size or self.region.view != entry.shape or entry.dtype.block > 1:
            return None
        start, stop = list(box.start), list(box.stop)
        for d, m in zip(taken, made, strict=True):
            start[d], stop[d] = box.start[d] + out.start[m], box.start[d] + out.stop[m]
        return Box(tuple(start), tuple(stop))

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "view": self.region.view, "start": self.region.box.start,
                "stop": self.region.box.stop, "shape": self.shape}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Transpose:
    """Exchange dimensions: dimension i of the output is dimension ``dims[i]`` of the input."""

    op: ClassVar[str] = "transpose"
    dims: tuple[int, ...]

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        spec = _single(inputs, self.op)
        if sorted(self.dims) != list(range(len(spec.shape))):
            raise ValueError(f"transposes dimensions {self.dims} of a tensor of shape {spec.shape}")
        if spec.dtype.block > 1 and self.dims[-1:] != (len(spec.shape) - 1,):
            raise ValueError(f"{spec.dtype} packs elements along the last dimension, which cannot be transposed")
        return TensorSpec(spec.dtype, tuple(spec.shape[d] for d in self.dims))

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        start, stop = [0] * len(self.dims), [0] * len(self.dims)
        for i, d in enumerate(self.dims):
            start[d], stop[d] = out.start[i], out.stop[i]
        return [Box(tuple(start), tuple(stop))]

    def inverse(self) -> Transpose:
        """Return the transpose that undoes this one."""
        return Transpose(tuple(self.dims.index(i) for i in range(len(self.dims))))

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "dims": self.dims}


@dataclass(frozen=True, slots=True)
class Permute:
    """Reorder rows: reshape to `view`, exchange its dimensions as `dims` says, and take the shape from before.

    Rotary heads are stored in two orders, which differ by such a permutation.
    """

    op: ClassVar[str] = "permute"
    view: Shape
    dims: tuple[int, ...]

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        spec = _single(inputs, self.op)
        if prod(self.view) != prod(spec.shape) or sorted(self.dims) != list(range(len(self.view))):
            raise ValueError(f"permutes the view {self.view} by {self.dims}, but the tensor is {spec.shape}")
        if is_blocks(spec.dtype) and not self.moves_rows(spec.shape):
            raise ValueError(f"{spec.dtype} packs elements along the last dimension, which cannot be permuted")
        return spec

    def moves_rows(self, shape: Shape) -> bool:
        """Whether rows of a tensor of `shape` stay whole."""
        return self.dims[-1:] == (len(self.dims) - 1,) and self.view[-1:] == shape[-1:]

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        shape = inputs[0].shape
        if not shape or self.dims[0] != 0 or shape[0] % self.view[0]:
            return [Box.whole(shape)]
        group = shape[0] // self.view[0]  # rows that stay together, a head
        start, stop = out.start[0] // group * group, -(-out.stop[0] // group) * group
        return [Box((start, *(0 for _ in shape[1:])), (stop, *shape[1:]))]

    def inverse(self) -> Permute:
        """Return the permutation that undoes this one."""
        return Permute(tuple(self.view[d] for d in self.dims), tuple(self.dims.index(i) for i in range(len(self.dims))))

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "view": self.view, "dims": self.dims}


@dataclass(frozen=True, slots=True)
class Dequantize:
    """Make float32 numbers of packed blocks. Planning adds it wherever a packed entry feeds a parameter of numbers."""

    op: ClassVar[str] = "dequantize"

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        spec = _single(inputs, self.op)
        if spec.dtype.kind is not Kind.PACKED:
            raise ValueError(f"dequantizes packed blocks, not {spec.dtype}")
        return TensorSpec(DTYPES["F32"], spec.shape)

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        n = inputs[0].dtype.block
        start, stop = out.start[-1] // n * n, -(-out.stop[-1] // n) * n
        return [Box((*out.start[:-1], start), (*out.stop[:-1], stop))]

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op}


@dataclass(frozen=True, slots=True)
class Add:
    """Add a constant to every element (norm weights that are stored as ``weight - 1``)."""

    op: ClassVar[str] = "add"
    value: float

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        spec = _single(inputs, self.op)
        if is_blocks(spec.dtype):
            raise ValueError(f"adds to numbers, not to blocks of {spec.dtype}")
        return spec

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        return [out]

    def inverse(self) -> Add:
        """Return the addition that undoes this one, up to rounding."""
        return Add(-self.value)

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "value": self.value}


@dataclass(frozen=True, slots=True)
class Stack:
    """Put equal tensors behind each other along a new dimension `dim` (experts)."""

    op: ClassVar[str] = "stack"
    dim: int = 0

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        first = _alike(inputs, self.op)
        if not 0 <= self.dim <= len(first.shape) - (first.dtype.block > 1):
            raise ValueError(f"cannot stack {first.dtype} tensors of shape {first.shape} along dimension {self.dim}")
        return TensorSpec(first.dtype, (*first.shape[: self.dim], len(inputs), *first.shape[self.dim :]))

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        d = self.dim
        inner = Box((*out.start[:d], *out.start[d + 1 :]), (*out.stop[:d], *out.stop[d + 1 :]))
        nothing = Box(inner.start, inner.start)
        return [inner if out.start[d] <= i < out.stop[d] else nothing for i in range(len(inputs))]

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "dim": self.dim}


@dataclass(frozen=True, slots=True)
class Concat:
    """Put tensors behind each other along the existing dimension `dim` (gate and up)."""

    op: ClassVar[str] = "concat"
    dim: int = 0

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        shapes = [(*s.shape[: self.dim], 0, *s.shape[self.dim + 1 :]) for s in inputs]
        outside = any(not 0 <= self.dim < len(s.shape) for s in inputs)
        if not inputs or outside or len(set(shapes)) > 1 or len({s.dtype for s in inputs}) > 1:
            found = ", ".join(f"{s.dtype} {s.shape}" for s in inputs)
            raise ValueError(f"cannot join {found or 'nothing'} along dimension {self.dim}")
        total = sum(s.shape[self.dim] for s in inputs)
        return TensorSpec(inputs[0].dtype, (*shapes[0][: self.dim], total, *shapes[0][self.dim + 1 :]))

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        boxes, at, d = [], 0, self.dim
        for spec in inputs:
            a = min(max(out.start[d] - at, 0), spec.shape[d])
            b = min(max(out.stop[d] - at, a), spec.shape[d])
            boxes.append(Box((*out.start[:d], a, *out.start[d + 1 :]), (*out.stop[:d], b, *out.stop[d + 1 :])))
            at += spec.shape[d]
        return boxes

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "dim": self.dim}


@dataclass(frozen=True, slots=True)
class Chain:
    """Several transforms one after the other; only the first may take several inputs."""

    op: ClassVar[str] = "chain"
    steps: tuple[Transform, ...]

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        specs = list(inputs)
        for step in self.steps:
            specs = [step.infer(specs)]
        return specs[0]

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        seen: list[Sequence[TensorSpec]] = [inputs]
        for step in self.steps[:-1]:
            seen.append([step.infer(seen[-1])])
        boxes: Sequence[Box] = [out]
        for step, specs in zip(reversed(self.steps), reversed(seen), strict=True):
            boxes = step.pull(boxes[0], specs)
        return boxes

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "steps": [s.to_json() for s in self.steps]}


@dataclass(frozen=True, slots=True)
class Custom:
    """The escape: a named function over whole inputs, whose output is declared.

    function: takes the list of whole input tensors, returns the output tensor. It is not part of the
    transform's identity, and a plan read back from JSON does not have it.
    """

    op: ClassVar[str] = "custom"
    name: str
    output: TensorSpec
    function: Callable[[Sequence[Any]], Any] | None = field(default=None, compare=False, repr=False)

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        return self.output

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        return [Box.whole(s.shape) for s in inputs]

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, "name": self.name, "dtype": dtype_to_json(self.output.dtype), "shape": self.output.shape}


def is_blocks(dtype: DType) -> bool:
    """Whether elements of the type have no bytes of their own, or are codes that only a decoder makes numbers of."""
    return dtype.block > 1 or dtype.kind is Kind.PACKED


def _alike(inputs: Sequence[TensorSpec], op: str) -> TensorSpec:
    if not inputs or any(s != inputs[0] for s in inputs):
        raise ValueError(f"{op} takes tensors of one shape and dtype, not {[(str(s.dtype), s.shape) for s in inputs]}")
    return inputs[0]
