"""Transforms that make one tensor of several: multiplying factors in, and putting parts together.

They are what an entry that lies in no file is made by (`Made` of the catalogue); plans write them as data like others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from tensorferry.core.boxes import Box, Region
from tensorferry.core.dtypes import DTYPES, Kind, dtype_to_json
from tensorferry.core.transforms import Dequantize, TensorSpec, Transform

__all__ = ["Assemble", "Each", "Scale"]


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiply numbers, packed or not, by factors: one for all, or one for each index of the first dimension.

    Inputs: the numbers, then the factors, a scalar or a vector. The product is made in float32 and left there. So
    GGUF files of llama.cpp carry the second factor of NVFP4 weights, one for each expert of a stack.
    """

    op: ClassVar[str] = "scale"

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if len(inputs) != 2:
            raise ValueError(f"scale takes numbers and their factors, not {len(inputs)} tensors")
        numbers, factors = inputs
        if numbers.dtype.kind not in (Kind.PACKED, Kind.FLOAT) or factors.dtype.kind is not Kind.FLOAT:
            raise ValueError(f"scale multiplies numbers by floats, not {numbers.dtype} by {factors.dtype}")
        if factors.shape not in ((), (1,), numbers.shape[:1]):
            raise ValueError(
                f"scale takes one factor, or one for each of the {numbers.shape[:1]}, not {factors.shape}, for "
                f"numbers of shape {numbers.shape}"
            )
        return TensorSpec(DTYPES["F32"], numbers.shape)

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        numbers, factors = inputs
        packed = numbers.dtype.kind is Kind.PACKED
        (box,) = Dequantize().pull(out, [numbers]) if packed else (out,)
        some = Box(out.start[:1], out.stop[:1]) if factors.shape and factors.shape != (1,) else None
        return [box, some or Box.whole(factors.shape)]

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op}


@dataclass(frozen=True, slots=True)
class Each:
    """Make several tensors, each of inputs of its own, and one of them all.

    made: for each of them, how many inputs it takes and through what; None for one input as it is. then: what makes
    one of them.
    """

    op: ClassVar[str] = "each"
    made: tuple[tuple[int, Transform | None], ...]
    then: Transform

    def groups(self, inputs: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Cut something that there is one of for each input into those of each tensor that is made."""
        counts = [count for count, _ in self.made]
        if sum(counts) != len(inputs):
            raise ValueError(f"each takes {sum(counts)} tensors, not {len(inputs)}")
        for a, b in pairwise(accumulate(counts, initial=0)):
            yield inputs[a:b]

    def specs(self, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return what `then` gets."""
        groups = zip(self.made, self.groups(inputs), strict=True)
        return [some[0] if via is None else via.infer(some) for (_, via), some in groups]

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        return self.then.infer(self.specs(inputs))

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        wanted = self.then.pull(out, self.specs(inputs))
        each = zip(self.made, self.groups(inputs), wanted, strict=True)
        return [box for (_, via), some, part in each for box in ([part] if via is None else via.pull(part, some))]

    def to_json(self) -> dict[str, Any]:
        made = [[count, via and via.to_json()] for count, via in self.made]
        return {"op": self.op, "made": made, "then": self.then.to_json()}


@dataclass(frozen=True, slots=True)
class Assemble:
    """Put parts of tensors where they belong in one, which they cover; values are cast to its type.

    pieces: for each input, which region of it goes to which region of the output.
    """

    op: ClassVar[str] = "assemble"
    output: TensorSpec
    pieces: tuple[tuple[Region, Region], ...]

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if len(inputs) != len(self.pieces):
            raise ValueError(f"assemble takes {len(self.pieces)} tensors, not {len(inputs)}")
        for spec, (window, into) in zip(inputs, self.pieces, strict=True):
            if not window.fits(spec.shape) or not into.fits(self.output.shape) or window.size != into.size:
                raise ValueError(f"cannot put {window} of a tensor of shape {spec.shape} to {into}")
        return self.output

    def pull(self, out: Box, inputs: Sequence[TensorSpec]) -> Sequence[Box]:
        return [self.taken(window, spec) for spec, (window, _) in zip(inputs, self.pieces, strict=True)]

    @staticmethod
    def taken(window: Region, spec: TensorSpec) -> Box:
        """Return the box of an input that holds `window` of it: all of it, where that is seen in another shape."""
        return window.box if window.view == spec.shape else Box.whole(spec.shape)

    def to_json(self) -> dict[str, Any]:
        pieces = [[_region_out(window), _region_out(into)] for window, into in self.pieces]
        dtype = dtype_to_json(self.output.dtype)
        return {"op": self.op, "dtype": dtype, "shape": self.output.shape, "pieces": pieces}


def _region_out(region: Region) -> list[Any]:
    return [region.view, region.box.start, region.box.stop]
