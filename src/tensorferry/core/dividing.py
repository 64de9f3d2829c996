"""Giving a rank its part of a parameter: what is declared for the whole one, seen from the part."""

from __future__ import annotations

from dataclasses import replace

from tensorferry.core.boxes import Region, Shape
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.errors import PlanError

__all__ = ["divided"]


def divided(tensor: TargetTensor, part: Region, shape: Shape, *, into: Region | None = None) -> TargetTensor:
    """Return what a rank needs that has `part` of a parameter, whose whole is described by `tensor`.

    shape: of the rank's parameter, which holds the elements of `part` in their order, in its region `into` or as all
    that it has. Slots of which the rank has nothing become absent ones; the others take a part of their window. Raises
    PlanError where what a rank has of a slot is no region of its logical tensor.

    >>> from tensorferry.core.boxes import Box
    >>> from tensorferry.core.dtypes import DTYPES
    >>> whole = TargetTensor.plain("w", DTYPES["F32"], (4, 2))
    >>> divided(whole, Region((4, 2), Box((2, 0), (4, 2))), (2, 2)).slots[""].window.box.slices
    (slice(2, 4, None), slice(0, 2, None))
    """
    into = Region.whole(shape) if into is None else into
    slots = {name: _part_of_slot(tensor.name, slot, part, into) for name, slot in tensor.slots.items()}
    kept = {name: slot for name, slot in slots.items() if slot is not None}
    absent = frozenset(name for name, slot in slots.items() if slot is None)
    return replace(tensor, shape=shape, slots=kept, absent=tensor.absent | absent)


def _part_of_slot(name: str, slot: Slot, part: Region, into: Region) -> Slot | None:
    lies = slot.local.seen_as(part.view)
    if lies is None:
        raise _undividable(name, f"it has a slot that is no box of {list(part.view)}")
    common = lies.box.meet(part.box)
    if common is None:
        return None
    window = _inner(slot.window, Region(lies.shape, common.relative_to(lies.box)))
    local = _inner(into, Region(part.shape, common.relative_to(part.box)))
    if window is None or local is None:
        raise _undividable(name, f"what a rank has of {list(slot.logical)} is no region of it")
    return Slot(local, slot.logical, window, slot.also)


def _inner(window: Region, part: Region) -> Region | None:
    """Return the region that is `part` of what `window` takes, where both count the same elements in one order.

    None where it is no box of either's view.
    """
    if window.shape == part.view:
        return window.part(part.box)
    if window.is_whole:  # then its order is the tensor's own, and its view may be any
        seen = part.seen_as(window.view)
        return part if seen is None else seen
    seen = part.seen_as(window.shape)
    return None if seen is None else window.part(seen.box)


def _undividable(name: str, why: str) -> PlanError:
    return PlanError(f"{name} cannot be divided among ranks: {why}")
