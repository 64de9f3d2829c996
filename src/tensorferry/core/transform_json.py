"""Transforms from the plain data that their ``to_json`` writes, those of `transforms` and those of `making`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorferry.core.boxes import Box, Region
from tensorferry.core.dtypes import dtype_from_json
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
from tensorferry.errors import RuleError

__all__ = ["transform_from_json"]


def transform_from_json(data: Mapping[str, Any]) -> Transform:
    """Return the transform that ``to_json`` described; raises RuleError for an operation that is not known."""
    match data["op"]:
        case "take":
            box = Box(tuple(data["start"]), tuple(data["stop"]))
            return Take(Region(tuple(data["view"]), box), tuple(data["shape"]))
        case "transpose":
            return Transpose(tuple(data["dims"]))
        case "permute":
            return Permute(tuple(data["view"]), tuple(data["dims"]))
        case "dequantize":
            return Dequantize()
        case "add":
            return Add(data["value"])
        case "stack":
            return Stack(data["dim"])
        case "concat":
            return Concat(data["dim"])
        case "chain":
            return Chain(tuple(transform_from_json(s) for s in data["steps"]))
        case "custom":
            return Custom(data["name"], TensorSpec(dtype_from_json(data["dtype"]), tuple(data["shape"])))
        case _:
            return _of_several(data)


def _of_several(data: Mapping[str, Any]) -> Transform:
    """Return a transform of `making`."""
    match data["op"]:
        case "scale":
            return Scale()
        case "each":
            made = tuple((count, via and transform_from_json(via)) for count, via in data["made"])
            return Each(made, transform_from_json(data["then"]))
        case "assemble":
            output = TensorSpec(dtype_from_json(data["dtype"]), tuple(data["shape"]))
            return Assemble(output, tuple((_region_in(window), _region_in(into)) for window, into in data["pieces"]))
        case other:
            raise RuleError(f"no transform is called {other!r}")


def _region_in(data: Sequence[Sequence[int]]) -> Region:
    view, start, stop = map(tuple, data)
    return Region(view, Box(start, stop))
