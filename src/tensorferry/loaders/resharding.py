"""How the whole tensors of a sharded state go to the slots of a model: rules from the names of slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn

from tensorferry.core.boxes import Box
from tensorferry.core.rules import Drop, Join, Place, Rule, Split
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Target, TargetTensor, owner_of
from tensorferry.core.transforms import Concat
from tensorferry.formats.opening import Opened
from tensorferry.formats.sharded_state_join import alias_entries, slot_name
from tensorferry.formats.sharded_state_manifest import RankManifest, SavedTensor

__all__ = ["other_types", "reshard_rules", "with_aliases"]


def with_aliases(opened: Opened, manifests: Sequence[RankManifest], target: Target) -> Opened:
    """Return what was opened with entries for tensors that were saved as tied to others, and are not tied here."""
    aliases = {alias: owner for manifest in manifests for alias, owner in manifest.aliases.items()}
    needed = [a for a in aliases if a in target and target[a].alias_of is None]
    if not needed:
        return opened
    entries = alias_entries(opened.catalogue, manifests, {alias: aliases[alias] for alias in needed})
    return replace(opened, catalogue=opened.catalogue.replacing((*opened.catalogue.values(), *entries)))


def other_types(target: Target, manifests: Sequence[RankManifest]) -> list[str]:
    """Return the parameters that were saved as another type than the model has, with both."""
    saved = {name: tensor.dtype for manifest in manifests for name, tensor in manifest.tensors.items()}
    saved |= {alias: saved[owner] for manifest in manifests for alias, owner in manifest.aliases.items()}
    both = ((name, saved.get(name), tensor.dtype) for name, tensor in target.items() if tensor.alias_of is None)
    return [f"{name}: saved as {one}, the model has {other}" for name, one, other in both if one not in (None, other)]


def reshard_rules(model: nn.Module, target: Target, manifests: Sequence[RankManifest], *, stage: bool) -> RuleSet:
    """Return the rules by which a state that was put together fills `target`.

    stage: whether the model is one of several pipeline stages, so that tensors of the others are none of its own.
    """
    saved: dict[str, dict[str, SavedTensor]] = {}
    aliases: dict[str, str] = {}
    for manifest in manifests:
        aliases |= manifest.aliases
        for name, tensor in manifest.tensors.items():
            for slot in tensor.slots if tensor.slots is not None else [""]:
                saved.setdefault(name, {}).setdefault(slot, tensor)
    untied = [a for a in aliases if a in target and target[a].alias_of is None]
    saved |= {alias: saved[aliases[alias]] for alias in untied if aliases[alias] in saved}
    found = ((name, target.get(owner_of(target, name)), slots) for name, slots in saved.items())
    return RuleSet(*(rule for name, tensor, slots in found for rule in _rules(model, tensor, name, slots, stage)))


def _rules(
    model: nn.Module, tensor: TargetTensor | None, name: str, slots: dict[str, SavedTensor], stage: bool
) -> Iterator[Rule]:
    if tensor is None:
        if stage:
            yield from (Drop(slot_name(name, slot), "of another pipeline stage") for slot in slots)
    elif [*slots] == [""]:
        parts = () if "" in tensor.slots else _placing(model, name)
        if parts:
            yield Split(name, parts)
    elif [*tensor.slots] == [""] and (joined := _concat(slots)) is not None:
        order, dim = joined
        yield Join(tuple(slot_name(name, slot) for slot in order), name, Concat(dim))
    else:
        yield from (Place(slot_name(name, slot), name, slot) for slot in slots)


def _placing(model: nn.Module, name: str) -> tuple[Any, ...]:
    """Return what the layer says of one tensor that holds all of its slots, as a `Split` takes it."""
    prefix, _, leaf = name.rpartition(".")
    placing = getattr(model.get_submodule(prefix), "placing", None)
    return tuple(placing(name, leaf)) if callable(placing) else ()


def _concat(slots: dict[str, SavedTensor]) -> tuple[list[str], int] | None:
    """Return the order and the dimension in which the slots lie one after the other in their parameter, if they do."""
    tensor = next(iter(slots.values()))
    regions = {name: slot.local.seen_as(tensor.shape) for name, slot in (tensor.slots or {}).items()}
    boxes = {name: region.box for name, region in regions.items() if region is not None}
    if boxes.keys() != slots.keys() or not tensor.shape:
        return None
    dim = next((d for d in range(len(tensor.shape)) if len({box.start[d] for box in boxes.values()}) > 1), 0)
    order = sorted(boxes, key=lambda name: boxes[name].start)
    return (order, dim) if _follow([boxes[name] for name in order], dim) else None


def _follow(boxes: Sequence[Box], dim: int) -> bool:
    """Whether boxes are alike but for `dim`, in which each begins where the one before it ends."""
    for one, other in pairwise(boxes):
        moved = other.shift(tuple(one.start[d] - other.start[d] if d == dim else 0 for d in range(len(one.start))))
        same = Box(moved.start, (*moved.stop[:dim], one.stop[dim], *moved.stop[dim + 1 :]))
        if other.start[dim] != one.stop[dim] or same != one:
            return False
    return True
