"""What post-processing makes of the tensors of a module: noted when its hooks run, and laid out again without them.

A saved state that is from after post-processing goes into a model that has not been through it; so it is known what
each tensor was before, and the model is given tensors of the saved types and shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import PlanError
from tensorferry.modules.describe import Place, places
from tensorferry.modules.distributed import is_dtensor
from tensorferry.numerics.torch_dtypes import dtype_of, logical_shape, torch_dtype, torch_shape

__all__ = ["changes_of", "lay_out", "noting_changes", "spec_of"]

_BEFORE = "_tensors_before_processing"
"""Attribute of a module: by local name, what the tensors were that hooks have changed, None for those they added."""

_Form = tuple[torch.dtype, tuple[int, ...], bool]  # and whether it is a DTensor


@contextmanager
def noting_changes(module: nn.Module) -> Iterator[None]:
    """Note in `module`, and in those inside, what tensors that are replaced, added or removed inside were before."""
    before, holders = _forms(module)
    yield
    after, more = _forms(module)
    holders |= more
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            _note(holders[key[0]], key[1], before.get(key))


def _forms(module: nn.Module) -> tuple[dict[tuple[int, str], _Form], dict[int, nn.Module]]:
    found = [p for p in places(module) if p.persistent and not is_lazy(p.tensor)]
    forms = {(id(p.module), p.leaf): _form(p.tensor) for p in found}
    return forms, {id(p.module): p.module for p in found}


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.dtype, tuple(tensor.shape), is_dtensor(tensor)


def _note(holder: nn.Module, leaf: str, old: _Form | None) -> None:
    vars(holder).setdefault(_BEFORE, {}).setdefault(leaf, old)


def changes_of(model: nn.Module) -> dict[str, TensorSpec | None]:
    """Return what each tensor that hooks have changed was before they ran, by name, None for one that was not there.

    Raises PlanError for one that was a DTensor, of which nobody knows how it lay on the ranks.
    """
    found: dict[str, TensorSpec | None] = {}
    for prefix, module in model.named_modules():
        for leaf, old in vars(module).get(_BEFORE, {}).items():
            now = module._parameters.get(leaf, module._buffers.get(leaf))
            if old != (None if now is None else _form(now)):
                name = f"{prefix}.{leaf}" if prefix else leaf
                found[name] = None if old is None else _spec_before(name, *old)
    return found


def _spec_before(name: str, dtype: torch.dtype, shape: tuple[int, ...], distributed: bool) -> TensorSpec:
    if distributed:
        raise PlanError(
            f"post-processing has made something else of the DTensor {name}, and how that lay on the ranks is not "
            "known any more: load the checkpoint into a model that is newly built"
        )
    return _spec(dtype, shape)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return type and shape of a tensor, in elements; raises UnsupportedDtype for a quantized one."""
    return _spec(tensor.dtype, tuple(tensor.shape))


def _spec(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSpec:
    found = dtype_of(dtype)
    return TensorSpec(found, logical_shape(found, shape))


def lay_out(
    model: nn.Module,
    wanted: Mapping[str, tuple[TensorSpec, bool]],
    aliases: Mapping[str, str],
    removed: Iterable[str],
    unset: Iterable[str],
) -> set[str]:
    """Give `model` the tensors that it has after post-processing, without values; return the names of those changed.

    wanted: by name, type and shape, and whether it is a buffer. What has them already stays as it is; others are made
    on meta, of the class and with the attributes of those whose place they take. aliases: names to hang the same tensor
    at. removed: names that go, of which `unset` stay registered as None. The modules of all names are there, and hold
    nothing else under them.
    """
    there = {place.name: place for place in places(model)}
    changed = {n for n, (spec, _) in wanted.items() if n not in there or spec_of(there[n].tensor) != spec}
    holders = {name: model.get_submodule(name.rpartition(".")[0]) for name in (*changed, *removed)}
    gone, empty = set(removed) & there.keys(), set(unset)
    for name in changed:
        spec, buffer = wanted[name]
        _put(holders[name], name.rpartition(".")[2], spec, there.get(name), buffer)
    for name in gone:
        _take_away(there[name], keep=name in empty)
    hung = {alias for alias, owner in aliases.items() if owner in wanted and _hang(model, alias, owner)}
    return changed | gone | hung


def _put(holder: nn.Module, leaf: str, spec: TensorSpec, old: Place | None, buffer: bool) -> None:
    made = torch.empty(torch_shape(spec.dtype, spec.shape), dtype=torch_dtype(spec.dtype), device="meta")
    old_form = None if old is None else _form(old.tensor)
    if buffer:
        vars(made).update({} if old is None else vars(old.tensor))
        holder._parameters.pop(leaf, None)
        _free(holder, leaf)
        holder.register_buffer(leaf, made)
    else:
        trained = old is not None and old.tensor.requires_grad and made.is_floating_point()
        parameter = nn.Parameter(made, requires_grad=trained)
        if old is not None and old.is_parameter and not is_dtensor(old.tensor):
            parameter.__class__ = type(old.tensor)  # type: ignore[assignment]
            vars(parameter).update(vars(old.tensor))
        holder._buffers.pop(leaf, None)
        _free(holder, leaf)
        holder.register_parameter(leaf, parameter)
    _note(holder, leaf, old_form)


def _free(holder: nn.Module, leaf: str) -> None:
    """Remove an attribute of that name that holds nothing yet, so that a tensor can have the name."""
    if leaf in vars(holder) and vars(holder)[leaf] is None:
        delattr(holder, leaf)


def _take_away(place: Place, *, keep: bool) -> None:
    tensors = place.module._parameters if place.is_parameter else place.module._buffers
    _note(place.module, place.leaf, _form(place.tensor))
    if keep:
        tensors[place.leaf] = None
    else:
        delattr(place.module, place.leaf)


def _hang(model: nn.Module, alias: str, owner: str) -> bool:
    """Hang the tensor `owner` at `alias`, too; return whether it was not there already."""
    (holder, leaf), (other, called) = (_split(model, name) for name in (alias, owner))
    kind = "_parameters" if called in other._parameters else "_buffers"
    tensor = vars(other)[kind][called]
    old = holder._parameters.get(leaf, holder._buffers.get(leaf))
    if old is tensor:
        return False
    for tensors in (holder._parameters, holder._buffers):
        tensors.pop(leaf, None)
    _free(holder, leaf)
    vars(holder)[kind][leaf] = tensor
    _note(holder, leaf, None if old is None else _form(old))
    return True


def _split(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, leaf = name.rpartition(".")
    return model.get_submodule(prefix), leaf
