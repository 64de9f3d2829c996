"""What one rank needs: parameters, their slots, and the window of a logical tensor that each slot takes.

Geometry is declared by whoever owns the parameter (a layer, a model, a compat adapter) and never guessed
from names.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from tensorferry.core.boxes import Region, Shape
from tensorferry.core.dtypes import DType

__all__ = ["Layout", "Slot", "Target", "TargetTensor", "owner_of"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of a parameter that one logical tensor feeds.

    local: which part of the parameter. logical: shape of the whole logical tensor, of all ranks.
    window: which part of the logical tensor this rank takes; it has as many elements as `local`.
    also: other shapes under which checkpoints carry the same logical tensor, element for element in the same
    order, such as ``(1,)`` for a scalar.
    """

    local: Region
    logical: Shape
    window: Region
    also: tuple[Shape, ...] = ()

    @classmethod
    def whole(cls, shape: Shape, *, also: tuple[Shape, ...] = ()) -> Slot:
        """Return the slot of an unsharded parameter that one entry fills."""
        region = Region.whole(shape)
        return cls(region, shape, region, also)

    @classmethod
    def of(cls, local: Region, logical: Shape) -> Slot:
        """Return the slot of a part of a parameter that takes a whole entry of shape `logical`, on every rank."""
        return cls(local, logical, Region.whole(logical))

    def __post_init__(self) -> None:
        if self.local.size != self.window.size:
            raise ValueError(f"slot takes {self.window.size} elements for {self.local.size} of its parameter")
        if not self.window.fits(self.logical):
            raise ValueError(f"window {self.window} is no region of the logical shape {self.logical}")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a layer lays one of its parameters out, where slots alone do not say it. Fields as in `TargetTensor`."""

    slots: Mapping[str, Slot]
    default: float | None = None
    absent: AbstractSet[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A parameter or persistent buffer to be filled.

    slots: by name; the unnamed slot ``""`` is what an entry of the parameter's own name goes to.
    default: value for elements that no slot covers (vocabulary padding); None where that is a problem.
    alias_of: the parameter that this one is tied to; such a tensor has no slots of its own.
    absent: names of slots that exist in the model but not on this rank (experts of other ranks).
    """

    name: str
    dtype: DType
    shape: Shape
    slots: Mapping[str, Slot] = field(default_factory=dict)
    default: float | None = None
    alias_of: str | None = None
    absent: AbstractSet[str] = frozenset()

    @classmethod
    def plain(cls, name: str, dtype: DType, shape: Shape) -> TargetTensor:
        """Return an unsharded parameter that one entry fills."""
        return cls(name, dtype, shape, {"": Slot.whole(shape)})


Target = Mapping[str, TargetTensor]
"""Everything that has to be filled on this rank, by parameter name."""


def owner_of(target: Target, name: str) -> str:
    """Return the tensor that `name` shares its values with, however many ties away; `name` where it is not tied."""
    first = target.get(name)
    if first is None or first.alias_of is None:
        return name
    seen = {name}
    while (tensor := target.get(name)) is not None and tensor.alias_of is not None and tensor.alias_of not in seen:
        name = tensor.alias_of
        seen.add(name)
    return name
