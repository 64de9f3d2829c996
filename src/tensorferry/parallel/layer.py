"""What all layers that are divided among ranks share: parameters with a declared layout, and pushing tensors into them.

Planning reads the layout through `tensor_slots`; `weight_loader` derives from the same one. No layer narrows anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from torch import nn

from tensorferry.core.boxes import Shape
from tensorferry.core.coverage import uncovered
from tensorferry.core.dtypes import Cast, cast_kind
from tensorferry.core.rules import Part
from tensorferry.core.target import Layout, Slot, TargetTensor
from tensorferry.core.transforms import Take
from tensorferry.errors import PlanError
from tensorferry.numerics.memory import view_region
from tensorferry.numerics.torch_dtypes import dtype_of
from tensorferry.parallel.division import part_slot

__all__ = ["ParallelLayer", "taken_from"]


class ParallelLayer(nn.Module):
    """A layer whose parameters are parts of logical tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._layouts: dict[str, Layout] = {}

    def tensor_slots(self) -> Mapping[str, Layout]:
        """Return how each parameter is laid out; see `tensorferry.modules.describe.DeclaresSlots`."""
        return dict(self._layouts)

    def fused_parts(self, parameter: str = "weight") -> Sequence[tuple[str, Take]]:
        """Return which part of one tensor that is fused on disk goes to each slot; nothing if there is one slot."""
        return ()

    def placing(self, into: str, parameter: str = "weight") -> tuple[Part, ...]:
        """Return what a `Split` of a tensor that is fused on disk sends to the slots of `into`, the full name of it."""
        return tuple(Part(into, slot, via) for slot, via in self.fused_parts(parameter))

    def weight_loader(
        self, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: str | int | None = None
    ) -> None:
        """Copy this rank's part of a whole logical tensor into `param`, a parameter of this layer.

        loaded_weight: of all ranks, on any device; copied, with a cast between floating types where they differ.
        loaded_shard_id: the slot ("q", "gate", or its number); None for the only one, or for all of a tensor that is
        fused on disk. Raises PlanError for a slot that is not there, and for another shape or sort of number.
        """
        name = self._name_of(param)
        layout = self._layouts.get(name) or Layout({"": Slot.whole(tuple(param.shape))})
        what = f"{type(self).__name__}.{name}"
        if loaded_shard_id is None and "" not in layout.slots:
            for slot, via in self._fused(name, what):
                _push(param, layout, slot, taken_from(loaded_weight, via, what), what)
            return
        _push(param, layout, _slot_name(layout, loaded_shard_id, what), loaded_weight, what)

    def declare(self, name: str, shape: Shape, layout: Layout, *, dtype: torch.dtype | None = None) -> None:
        """Register a parameter of `shape` without values, laid out as `layout` says. It takes no gradient."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        self._layouts[name] = layout
        self._offer_loader()

    def declare_rows(
        self,
        name: str,
        taken: Mapping[str, tuple[int, range]],
        rest: Shape = (),
        *,
        default: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Register a parameter made of parts of the rows of logical tensors, in the order of `taken`.

        taken: by slot, how many rows the logical tensor has and which of them are taken. rest: its other dimensions.
        default: value of elements that no slot covers.
        """
        local = (sum(len(part) for _, part in taken.values()), *rest)
        starts = accumulate((len(part) for _, part in taken.values()), initial=0)
        slots = {
            slot: part_slot(local, at, (size, *rest), part, 0)
            for (slot, (size, part)), at in zip(taken.items(), starts, strict=False)
        }
        self.declare(name, local, Layout(slots, default=default), dtype=dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Let what ``to`` and ``to_empty`` put in the place of parameters have their loader."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._offer_loader()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the parameters of a copy have a loader that fills the copy."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._offer_loader()

    def _offer_loader(self) -> None:
        for name in self._layouts:
            parameter = self._parameters[name]
            owner = getattr(getattr(parameter, "weight_loader", None), "__self__", None)
            if parameter is not None and (owner is None or owner._parameters.get(name) is not parameter):
                parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    def _name_of(self, param: torch.Tensor) -> str:
        for name, own in (*self._parameters.items(), *self._buffers.items()):
            if own is param:
                return name
        raise PlanError(
            f"{type(self).__name__} was given a parameter of shape {tuple(param.shape)} that is not its own"
        )

    def _fused(self, name: str, what: str) -> Sequence[tuple[str, Take]]:
        parts = self.fused_parts(name)
        if not parts:
            raise PlanError(f"{what} is filled in parts: say which of {', '.join(self._layouts[name].slots)} this is")
        return parts


def _slot_name(layout: Layout, shard: str | int | None, what: str) -> str:
    names = list(layout.slots)
    if isinstance(shard, int):
        if 0 <= shard < len(names):
            return names[shard]
    elif (shard or "") in layout.slots:
        return shard or ""
    raise PlanError(f"{what} has no slot {shard!r}: it has {', '.join(map(repr, names))}")


def taken_from(tensor: torch.Tensor, via: Take, what: str) -> torch.Tensor:
    """Return the part of `tensor` that `via` takes; a view where it can be. what: for the message of a PlanError."""
    region = via.region
    if not region.fits(tuple(tensor.shape)):
        raise PlanError(f"{what}: a tensor of shape {tuple(tensor.shape)} is not fused as {list(region.view)}")
    return view_region(tensor, region).reshape(via.shape)


def _push(param: torch.Tensor, layout: Layout, name: str, loaded: torch.Tensor, what: str) -> None:
    """Copy what a slot takes of `loaded` to where the slot lies, and fill what no slot covers."""
    slot, found = layout.slots[name], tuple(loaded.shape)
    where = f"{what}[{name}]" if name else what
    if found != slot.logical and found not in slot.also:
        raise PlanError(f"{where}: the tensor has shape {found}, all ranks together expect {slot.logical}")
    kind = cast_kind(dtype_of(loaded.dtype), dtype_of(param.dtype))
    if kind is Cast.CHANGES_KIND:
        raise PlanError(f"{where}: the tensor has {loaded.dtype}, which {param.dtype} is no other precision of")
    with torch.no_grad():
        into = view_region(param.detach(), slot.local)
        taken = view_region(loaded if found == slot.logical else loaded.reshape(slot.logical), slot.window)
        into.copy_(taken if taken.shape == into.shape else taken.reshape(into.shape))
        if layout.default is not None:
            tensor = TargetTensor(what, dtype_of(param.dtype), tuple(param.shape), layout.slots)
            for hole in uncovered(tensor):
                view_region(param.detach(), hole).fill_(layout.default)
