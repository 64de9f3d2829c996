"""Whether a model is what a rank saved, and what it takes to be as it was saved. Touches no model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tensorferry.core.boxes import Region, Shape
from tensorferry.core.plan import Strictness
from tensorferry.core.target import Slot, Target, TargetTensor, owner_of
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import ConfigError, shown
from tensorferry.formats.sharded_state_manifest import RankManifest, SavedTensor
from tensorferry.loaders.saving import method_of
from tensorferry.modules.describe import places
from tensorferry.modules.distributed import memory_of

__all__ = ["Restored", "misfits", "other_layout", "refuse_other_method", "restored", "sub_views"]


@dataclass(frozen=True, slots=True)
class Restored:
    """What a model takes to be as it was saved.

    target: what has to be filled then. wanted: tensors that post-processing has changed, to type and shape, and whether
    each is a buffer. removed: those that it has taken away.
    """

    target: Target
    wanted: Mapping[str, tuple[TensorSpec, bool]]
    removed: tuple[str, ...]


def restored(target: Target, manifest: RankManifest) -> Restored:
    """Return what a model that is described by `target` and fits `manifest` takes to be as it was saved."""
    changed, tensors = manifest.changed, manifest.tensors
    gone = tuple(n for n in changed if n in target and n not in tensors and n not in manifest.aliases)
    kept = {name: _kept(t, manifest) for name, t in target.items() if name not in gone}
    added = {name: saved.alone(name) for name, saved in tensors.items() if name not in target}
    wanted = {name: (saved.spec, saved.buffer) for name, saved in tensors.items() if name in changed}
    return Restored(kept | added | dict(_tied_anew(target, manifest, wanted)), wanted, gone)


def _tied_anew(target: Target, manifest: RankManifest, wanted: Collection[str]) -> Iterator[tuple[str, TargetTensor]]:
    """Yield the tensors that post-processing has tied to one that it made, as aliases of that."""
    for alias, owner in manifest.aliases.items():
        own = all(name not in target or target[name].alias_of is None for name in (alias, owner))
        if owner in wanted and own and (alias not in target or alias in manifest.changed):
            saved = manifest.tensors[owner]
            yield alias, TargetTensor(alias, saved.dtype, saved.shape, alias_of=owner)


def _kept(tensor: TargetTensor, manifest: RankManifest) -> TargetTensor:
    """Return a tensor of the model as something to be filled with just what was saved of it, if it is no alias."""
    saved = manifest.tensors.get(manifest.aliases.get(tensor.name, tensor.name))
    if tensor.alias_of is not None:
        return tensor
    return TargetTensor.plain(tensor.name, tensor.dtype, tensor.shape) if saved is None else saved.alone(tensor.name)


def refuse_other_method(model: nn.Module, manifest: RankManifest, asked: str | None) -> None:
    """Raise ConfigError where the state is of another quantization than the model, or than was `asked` for."""
    if asked is not None and asked != manifest.quantization:
        saved = shown(repr(manifest.quantization))
        raise ConfigError(f"the state was saved with the quantization {saved}, and the load asks for {asked!r}")
    holders = {name.rpartition(".")[0] for name in manifest.tensors}
    for name, module in model.named_modules():
        saved, now = manifest.methods.get(name, ""), method_of(module)
        if saved != now and (name in manifest.methods or name in holders):
            raise ConfigError(
                f"{name or 'the model'} was saved with the quantization method {shown(saved) or 'none'}, and has"
                f" {now or 'none'} here: build the model as it was saved"
            )


def misfits(model: nn.Module, target: Target, manifest: RankManifest, strict: Strictness) -> list[str]:
    """Return what of the model is not as it was saved, by name, with both sides."""
    return [*_of_model(target, manifest, strict), *_of_state(model, target, manifest), *_unfit_names(model, manifest)]


def _of_model(target: Target, manifest: RankManifest, strict: Strictness) -> Iterator[str]:
    for name, tensor in target.items():
        if tensor.alias_of is not None:
            continue
        now = TensorSpec(tensor.dtype, tensor.shape)
        saved = manifest.tensors.get(manifest.aliases.get(name, name))
        before = manifest.changed.get(name)
        forms = [form for form in (before, None if saved is None else saved.spec) if form is not None]
        if not forms and strict.needs(name):
            yield f"{name}: the state lacks it"
        elif forms and now not in forms:
            yield f"{name}: saved as {' and then '.join(map(_said, forms))}, the model has {_said(now)}"


def _of_state(model: nn.Module, target: Target, manifest: RankManifest) -> Iterator[str]:
    modules = {name for name, _ in model.named_modules()}
    for name in manifest.tensors:
        added = name in manifest.changed and manifest.changed[name] is None
        if name not in target and not (added and name.rpartition(".")[0] in modules):
            yield f"{shown(name)}: the model lacks it"


def _unfit_names(model: nn.Module, manifest: RankManifest) -> Iterator[str]:
    """Yield where tensors that post-processing has left would have to hang, and none can."""
    laid = [name for name in manifest.changed if name in manifest.tensors]
    for name in (*laid, *(alias for alias, owner in manifest.aliases.items() if owner in manifest.changed)):
        prefix, _, leaf = name.rpartition(".")
        try:
            holder = model.get_submodule(prefix)
        except AttributeError:
            yield f"{shown(name)}: the model lacks its module"
            continue
        if not leaf or name.startswith(".") or not _can_hold(holder, leaf):
            yield f"{shown(name)}: no tensor can be called so in {type(holder).__name__}"


def _can_hold(holder: nn.Module, leaf: str) -> bool:
    if leaf in holder._parameters or leaf in holder._buffers:
        return True
    return vars(holder)[leaf] is None if leaf in vars(holder) else not hasattr(holder, leaf)


def _said(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def other_layout(target: Target, manifest: RankManifest) -> str:
    """Return what layers lay out otherwise than when they were saved, in one clause, or ""."""
    for name, saved in manifest.tensors.items():
        tensor = target.get(owner_of(target, name))
        if tensor is not None and saved.shape != tensor.shape and _is_whole_of(saved, tensor):
            return f"{shown(name)} was saved whole, as {list(saved.shape)}, and lies in {list(tensor.shape)} here"
        if tensor is None or saved.slots is None or saved.shape != tensor.shape:
            continue
        for slot in dict.fromkeys((*saved.slots, *tensor.slots)):
            one, other = (_window(slots.get(slot), saved.shape) for slots in (saved.slots, tensor.slots))
            if one != other:
                where = f"{shown(name)}[{shown(slot)}]" if slot else shown(name)
                return f"{where} was saved as {_words(one)}, and is {_words(other)} here"
    return ""


def _is_whole_of(saved: SavedTensor, tensor: TargetTensor) -> bool:
    """Whether what was saved is the logical tensor of the only slot of `tensor`, as converting writes it."""
    logical = [slot.logical for slot in tensor.slots.values()]
    return saved.slots is None and not saved.processed and logical == [saved.shape]


_Window = tuple[Region, Shape, Region]


def _window(slot: Slot | None, shape: Shape) -> _Window | None:
    """Return which part of which tensor a slot is, in one of the ways to say it; None for no part at all."""
    if slot is None or not slot.local.size:
        return None
    local, window = slot.local.seen_as(shape), slot.window.seen_as(slot.logical)
    return local or slot.local, slot.logical, window or slot.window


def _words(window: _Window | None) -> str:
    if window is None:
        return "no part of any tensor"
    local, logical, part = window
    return f"{list(part.box.start)} to {list(part.box.stop)} of {list(logical)} at {list(local.box.start)}"


def sub_views(model: nn.Module) -> set[str]:
    """Return the tensors that are a smaller part of the memory of another one, which states of vLLM leave out."""
    memory: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for place in places(model):
        tensor = memory_of(place.tensor)
        if place.persistent and tensor.device.type != "meta" and tensor.numel():
            start = tensor.data_ptr()
            key = (tensor.device, tensor.untyped_storage().data_ptr())
            memory.setdefault(key, []).append((start, -(start + _extent(tensor)), place.name))
    return {name for parts in memory.values() for name in _inner(sorted(parts))}


def _extent(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _inner(parts: Iterable[tuple[int, int, str]]) -> Iterator[str]:
    """Yield the names of those of `parts`, sorted by start and then by length, that lie in an earlier one."""
    begin, end = -1, 0
    for start, negative, name in parts:
        stop = -negative
        if stop <= end and (start, stop) != (begin, end):
            yield name
        elif stop > end:
            begin, end = start, stop
