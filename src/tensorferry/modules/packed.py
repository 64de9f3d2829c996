"""Parameters that keep packed blocks as they lie in the file, for layers with kernels of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from tensorferry.core.boxes import Shape
from tensorferry.core.cutting import in_blocks
from tensorferry.core.dtypes import DType, Kind
from tensorferry.core.plan import Plan, Step
from tensorferry.core.transforms import Chain, Dequantize
from tensorferry.errors import ConfigError, PlanError, shown
from tensorferry.numerics.packed import PackedTensor, packed_type
from tensorferry.numerics.torch_dtypes import torch_shape

__all__ = ["PackedParameter", "keep_packed", "packed_types"]


class PackedParameter(nn.Parameter):
    """Blocks of a packed type: uint8 of shape (..., bytes of a row), without gradient.

    A load fills it with blocks of that type as they are; its slots, like its shape in a plan, count elements. The
    state dict of a module has its bytes, not its type.

    >>> weight = PackedParameter.empty("Q8_0", (6, 64), device="meta")
    >>> weight.shape, weight.packed
    (torch.Size([6, 68]), PackedTensor(Q8_0 (6, 64)))
    """

    dtype_of_blocks: DType

    def __new__(cls, packed: PackedTensor) -> Self:
        """Make a parameter that aliases the blocks of `packed`."""
        made = super().__new__(cls, packed.blocks, False)
        made.dtype_of_blocks = packed.dtype
        return made

    def __init__(self, packed: PackedTensor) -> None:
        super().__init__()

    @classmethod
    def empty(cls, dtype: DType | str, shape: Shape, *, device: torch.device | str | None = None) -> Self:
        """Return an uninitialized parameter for a tensor of `shape`, in elements, of the packed type `dtype`.

        Raises ConfigError where `dtype` is no packed type or rows are not whole blocks.
        """
        kind = packed_type(dtype)
        shape = tuple(shape)
        if not shape or shape[-1] % kind.block:
            raise ConfigError(f"rows of {kind} are whole blocks of {kind.block} elements: {shape} has no such rows")
        return cls(PackedTensor(torch.empty(torch_shape(kind, shape), dtype=torch.uint8, device=device), kind))

    @property
    def packed(self) -> PackedTensor:
        """The blocks with their type, which alias this parameter."""
        return PackedTensor(self.detach(), self.dtype_of_blocks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = type(self)(PackedTensor(self.detach().clone(), self.dtype_of_blocks))
        made: Self = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[type[Self], tuple[PackedTensor]]:
        return type(self), (self.packed,)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedParameter({self.dtype_of_blocks} {self.packed.shape})"


def packed_types(plan: Plan) -> Mapping[str, DType]:
    """Return which parameters of `plan` could be kept packed, with the type that the checkpoint has for them.

    They are those filled, by packed entries of one type, with nothing but their rows, in whatever order, cut between
    blocks if at all: not those that get one type in one part and another one in the next, as fused parameters may.
    """
    found: dict[str, DType | None] = {}
    for step in plan.steps:
        dtype = _kept_type(step)
        found[step.parameter] = dtype if found.get(step.parameter, dtype) == dtype else None
    return {name: dtype for name, dtype in found.items() if dtype is not None}


def keep_packed(model: nn.Module, types: Mapping[str, DType]) -> None:
    """Give `model` packed parameters for those named, uninitialized, on the devices of those that they replace.

    What is tied stays tied. Whoever runs the model has layers that know what to do with them. Raises PlanError for a
    name that is no parameter.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    if absent := sorted(types.keys() - names.keys()):
        raise PlanError(f"{type(model).__name__} has no parameter {shown(absent[0])!r} that could be kept packed")
    made = {
        id(p): PackedParameter.empty(types[n], tuple(p.shape), device=p.device) for n, p in names.items() if n in types
    }
    for name, parameter in names.items():
        if id(parameter) in made:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, made[id(parameter)])


def _kept_type(step: Step) -> DType | None:
    kinds = {source.entry.dtype for source in step.sources}
    dtype = kinds.pop() if len(kinds) == 1 else None
    if dtype is None or dtype.kind is not Kind.PACKED:
        return None
    steps = step.via.steps if isinstance(step.via, Chain) else (step.via,)
    if not isinstance(steps[-1], Dequantize) or step.window is None:
        return None
    whole = all(in_blocks(region, dtype) is not None for region in (step.into, step.window))
    return dtype if whole else None
