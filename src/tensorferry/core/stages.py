"""Pipeline stages: which parameters belong to which, judged from the numbers of layers in their names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tensorferry.core.target import Target, TargetTensor, owner_of
from tensorferry.errors import ConfigError

__all__ = ["on_stage"]

_FIRST, _LAST = -1, -2
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def on_stage(target: Target, stages: int, stage: int) -> Target:
    """Return what one of so many stages needs of `target`: its share of the layers, and what comes before or after.

    Layers are dealt in blocks, the first stages one more where they do not divide. What comes before the first layer
    belongs to the first stage, what comes after the last one to the last; what is tied is wherever one of its names
    is. Parameters of other stages stay in the target, empty, so that their entries have a reason to be dropped.

    Raises ConfigError where there are fewer layers than stages.
    """
    if stages == 1:
        return target
    layers = sorted({int(m[1]) for name in target if (m := _LAYER.search(name))})
    if len(layers) < stages:
        raise ConfigError(f"{len(layers)} layers cannot be dealt to {stages} pipeline stages: some would have none")
    each, more = divmod(len(layers), stages)
    first = stage * each + min(stage, more)
    mine = set(layers[first : first + each + (stage < more)])
    here = mine | ({_FIRST} if stage == 0 else set()) | ({_LAST} if stage == stages - 1 else set())
    kept = {name for name, place in _places(target) if place in here}
    kept |= {owner_of(target, name) for name in kept}
    return {name: tensor if name in kept else _elsewhere(tensor) for name, tensor in target.items()}


def _places(target: Target) -> Iterator[tuple[str, int]]:
    """Yield each name with its layer, or with where it comes."""
    begun = False
    for name in target:
        layer = _LAYER.search(name)
        begun = begun or layer is not None
        yield name, int(layer[1]) if layer else _LAST if begun else _FIRST


def _elsewhere(tensor: TargetTensor) -> TargetTensor:
    if tensor.alias_of is not None:
        return tensor
    return replace(tensor, shape=(0,), slots={}, default=None, absent=frozenset(tensor.slots) | tensor.absent)
