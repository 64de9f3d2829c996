"""Counting in torch elements: what core counts in elements or in blocks of a type, torch may hold packed."""

from __future__ import annotations

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.cutting import in_blocks
from tensorferry.core.dtypes import DType
from tensorferry.numerics.torch_dtypes import torch_elements, torch_shape

__all__ = ["blocks_to_torch", "to_torch"]


def to_torch(region: Region, dtype: DType) -> Region:
    """Return a region counted in elements of `dtype` as one counted in torch elements.

    All of a tensor whose rows are no whole blocks is flat bytes; part of one cannot be had and raises ValueError.
    """
    if dtype.block == 1:
        return region
    blocks = in_blocks(region, dtype)
    if blocks is None:
        if not region.is_whole:
            raise ValueError(f"{region.box} cuts through a block of {dtype.block} {dtype} elements")
        return Region.whole(torch_shape(dtype, region.view))
    k = torch_elements(dtype)
    return Region(_scaled(blocks.view, k), blocks_to_torch(blocks.box, dtype))


def blocks_to_torch(box: Box, dtype: DType) -> Box:
    """Return a box counted in blocks as one counted in torch elements."""
    k = torch_elements(dtype)
    return box if k == 1 else Box(_scaled(box.start, k), _scaled(box.stop, k))


def _scaled(shape: Shape, k: int) -> Shape:
    return (*shape[:-1], shape[-1] * k) if shape else shape
