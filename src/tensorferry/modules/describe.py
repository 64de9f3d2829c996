"""What a module needs: its parameters and persistent buffers as a Target, with the slots that layers declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.dtypes import DType
from tensorferry.core.target import Layout, Slot, Target, TargetTensor, owner_of
from tensorferry.errors import PlanError
from tensorferry.modules.distributed import (
    ORDINARY,
    box_of,
    dtensor_class,
    is_dtensor,
    is_wrapper,
    memory_of,
    refuse_wrapper,
    reshard,
    spec_of,
)
from tensorferry.modules.packed import PackedParameter
from tensorferry.numerics.torch_dtypes import dtype_of, logical_shape

__all__ = [
    "ORDINARY",
    "DeclaresSlots",
    "Place",
    "declares_slots",
    "describe",
    "dtensors_of",
    "identity_of",
    "offers",
    "places",
    "places_by_owner",
    "seen_as_plain",
    "tensors_of",
    "walked",
    "walked_once",
]


seen_as_plain = torch._C.DisableTorchFunctionSubclass
"""Within it, torch does not ask the class of a tensor for its shape and the like: those of vLLM take ten times as long,
and say the same."""


@runtime_checkable
class DeclaresSlots(Protocol):
    """A layer that says how its parameters are laid out: which part each logical tensor feeds."""

    def tensor_slots(self) -> Mapping[str, Mapping[str, Slot] | Layout]:
        """Return slots by the local name of the parameter, then by the name of the slot.

        A `Layout` says more: what fills the elements that no slot covers (padding of a vocabulary), and which slots
        are those of other ranks (experts). Parameters that are not named are plain: one entry of the same name and
        shape fills them.
        """
        ...


class Place(NamedTuple):
    """Where a tensor hangs: the attribute `leaf` of `module`, called `name` from the root."""

    name: str
    module: nn.Module
    leaf: str
    tensor: torch.Tensor
    persistent: bool
    is_parameter: bool


def offers(module: object, method: str) -> bool:
    """Whether `module` has a `method`, which None takes away; told sooner than by a protocol, of many thousands."""
    return vars(module).get(method, getattr(type(module), method, None)) is not None


def declares_slots(module: object) -> TypeGuard[DeclaresSlots]:
    """Whether `module` says how its parameters are laid out."""
    return offers(module, "tensor_slots")


def places(model: nn.Module) -> Iterator[Place]:
    """Yield every place where a tensor hangs, in module order; a tied tensor comes once for each of its names."""
    for prefix, module in walked(model):
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield Place(prefix + leaf, module, leaf, parameter, True, True)
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                kept = leaf not in module._non_persistent_buffers_set
                yield Place(prefix + leaf, module, leaf, buffer, kept, False)


def places_by_owner(model: nn.Module, target: Target) -> dict[str, list[Place]]:
    """Return the places where the tensors of `target` hang, by their names; those of tied ones by that of the owner."""
    found: dict[str, list[Place]] = {}
    for place in places(model):
        if (wanted := target.get(place.name)) is not None:
            owner = place.name if wanted.alias_of is None else owner_of(target, place.name)
            found.setdefault(owner, []).append(place)
    return found


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of `places`, in their order."""
    for _, module in walked(model):
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    yield tensor


def walked(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module in module order, once for each of its names, with that name and its dot: ``"layers.0."``.

    It is ``model.named_modules(remove_duplicate=False)``, which hands each module up through all of its parents.
    """
    found: list[tuple[str, nn.Module]] = []
    _walk("", model, found)
    return found


def walked_once(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what `walked` does, but every module under its first name only."""
    found: dict[nn.Module, str] = {}
    for prefix, module in walked(model):
        found.setdefault(module, prefix)
    return [(prefix, module) for module, prefix in found.items()]


def _walk(prefix: str, module: nn.Module, found: list[tuple[str, nn.Module]]) -> None:
    if type(module).named_modules is not nn.Module.named_modules:
        named = module.named_modules(prefix=prefix[:-1], remove_duplicate=False)
        found += [(name + "." if name else "", inner) for name, inner in named]
        return
    found.append((prefix, module))
    for name, child in module._modules.items():
        if child is not None and issubclass(type(child), nn.Module):  # a weak reference to one says that it is, too
            _walk(f"{prefix}{name}.", child, found)


def describe(model: nn.Module) -> Target:
    """Return everything of `model` that a checkpoint has to fill, by name, in module order.

    Tensors that hang in several places are tied: the first name owns the tensor, the others are its aliases.
    Non-persistent buffers are left out; models compute those. Nothing is allocated, so `model` may be on meta.
    Of a DTensor, this rank has a window of the logical tensor; FSDP2 hangs the parts of its parameters first, where
    whole ones hang since a forward pass.

    Raises PlanError for a parameter of a lazy module, which has no shape yet, and for tensors that cannot be filled:
    see `box_of` and `refuse_wrapper`. UnsupportedDtype for a quantized tensor.
    """
    reshard(model)
    target: dict[str, TargetTensor] = {}
    owners: dict[object, str] = {}
    for place in places(model):
        if not place.persistent:
            continue
        tensor = place.tensor
        plain = type(tensor) in ORDINARY
        if not plain:
            _refuse_unready(place)
            tensor = memory_of(tensor)
        with seen_as_plain():
            if not plain and isinstance(tensor, PackedParameter):
                dtype = tensor.dtype_of_blocks
            else:
                dtype = dtype_of(tensor.dtype)
            shape = logical_shape(dtype, tuple(tensor.shape))
        owner = owners.setdefault(identity_of(tensor), place.name)
        if owner != place.name:
            target[place.name] = TargetTensor(place.name, dtype, shape, alias_of=owner)
        else:
            layout = _layout(place, shape) if tensor is place.tensor else _part(place, dtype, shape)
            target[place.name] = TargetTensor(
                place.name, dtype, shape, layout.slots, default=layout.default, absent=layout.absent
            )
    return target


def dtensors_of(model: nn.Module) -> dict[str, object]:
    """Return how each DTensor of `model` lies on the ranks, by name, to be compared with what it was."""
    if dtensor_class() is None:
        return {}
    return {p.name: spec_of(p.tensor) for p in places(model) if p.persistent and is_dtensor(p.tensor)}


def _refuse_unready(place: Place) -> None:
    """Raise PlanError for a tensor, of a class of its own, that has no shape yet or no memory to fill."""
    if is_lazy(place.tensor):
        raise PlanError(
            f"{place.name} has no shape yet, as {type(place.module).__name__} finds it out from its first input: "
            "run the model once before loading, or give the module its sizes"
        )
    if is_wrapper(place.tensor) and not is_dtensor(place.tensor):
        refuse_wrapper(place.name, place.tensor)


@lru_cache(maxsize=1024)  # of a model with tens of thousands of tensors, few shapes differ
def _whole(shape: tuple[int, ...]) -> Slot:
    """Return the slot of a tensor that an entry of its own shape fills."""
    return Slot.whole(shape, also=_scalars(shape))


def _part(place: Place, dtype: DType, shape: Shape) -> Layout:
    """Return how the local part of a DTensor, which is of `shape`, is filled from the whole."""
    module: object = place.module
    if declares_slots(module) and place.leaf in _declared(module):
        raise PlanError(
            f"{place.name} is a DTensor, and tensor_slots of {type(module).__name__} says how it is laid out: only one "
            "can say which part is this rank's; let the layer divide it, or take it out of tensor_slots"
        )
    box = box_of(place.name, place.tensor)
    if box is None:
        return Layout({}, absent=frozenset({""}))
    whole, start, stop = (logical_shape(dtype, tuple(n)) for n in (place.tensor.shape, box.start, box.stop))
    return Layout({"": Slot(Region.whole(shape), whole, Region(whole, Box(start, stop)), _scalars(whole))})


def _layout(place: Place, shape: tuple[int, ...]) -> Layout:
    module: object = place.module
    if declares_slots(module):
        declared = _declared(module)
        unknown = declared.keys() - place.module._parameters.keys() - place.module._buffers.keys()
        if unknown:
            whose = place.name.removesuffix(place.leaf) + min(unknown)
            raise PlanError(f"{type(place.module).__name__} declares slots of {whose}, which it does not have")
        if place.leaf in declared:
            return declared[place.leaf]
    return Layout({"": _whole(shape)})


def _declared(module: DeclaresSlots) -> Mapping[str, Layout]:
    """Return what a layer declares; raises PlanError for what are no slots, saying what is expected."""
    declared: object = module.tensor_slots()
    who = f"tensor_slots of {type(module).__name__}"
    if not isinstance(declared, Mapping):
        raise PlanError(f"{who} returns {_kind(declared)}, not a mapping of parameters to their slots")
    return {parameter: _checked(who, parameter, given) for parameter, given in declared.items()}


def _checked(who: str, parameter: object, given: object) -> Layout:
    layout = given if isinstance(given, Layout) else None
    slots: object = given if layout is None else layout.slots
    if not isinstance(slots, Mapping):
        raise PlanError(f"{who} gives {parameter!r} {_kind(slots)}, not a mapping of slot names to Slots")
    for name, slot in slots.items():
        if not isinstance(slot, Slot) or not isinstance(name, str):
            raise PlanError(f"{who} gives {parameter!r} {name!r}: {_kind(slot)}, where a name and a Slot are expected")
    return layout or Layout(slots)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _scalars(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return {(): ((1,),), (1,): ((),)}.get(shape, ())


def identity_of(tensor: torch.Tensor) -> object:
    """Tensors with equal identities share their values: one object, or one piece of memory; of DTensors, locally."""
    is_other = False
    if type(tensor) not in ORDINARY:
        tensor = memory_of(tensor)
        is_other = is_wrapper(tensor)  # of which addresses say nothing
    with seen_as_plain():
        if is_other or tensor.is_meta or tensor.numel() == 0:
            return id(tensor)
        return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
