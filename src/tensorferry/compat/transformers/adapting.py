"""How a transformers model is filled from a checkpoint: its target, with its ties, and rules for every name.

Names are renamed by transformers' own mapping; what converters do is worked out in `conversions`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from tensorferry.compat.gguf.factors import with_factors
from tensorferry.compat.transformers import internals
from tensorferry.compat.transformers.conversions import Arrangement, Group, arrange
from tensorferry.compat.transformers.finishing import finish
from tensorferry.compat.transformers.ingredients import Ingredient, Ingredients
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.dividing import divided
from tensorferry.core.made import chained
from tensorferry.core.rules import Drop, Part, Place, Rule, Split
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, Target, TargetTensor, owner_of
from tensorferry.core.wrappers import stripping_told, unwrapping
from tensorferry.errors import ConfigError
from tensorferry.modules.adapters import Adapted
from tensorferry.modules.describe import describe, dtensors_of, places

__all__ = ["adapt"]


def adapt(model: nn.Module, catalogue: Catalogue) -> Adapted | None:
    """Return how `model` is filled from `catalogue`; see `tensorferry.modules.adapters.Adapter`.

    None for a module that is no `PreTrainedModel`, such as a single layer of one.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    mine, catalogue = describe(model), with_factors(catalogue)
    dtensors = {name: spec for name, spec in dtensors_of(model).items() if mine[owner_of(mine, name)].slots}
    target: Target = {name: _undivided(mine, name) if name in dtensors else t for name, t in mine.items()}
    mapping = internals.mapping_of(model)
    ingredients = Ingredients.find(catalogue, model.config)
    names = _Names.of(model, mapping, ingredients, target)
    arranged = Arrangement()
    for group in names.groups.values():
        arrange(group, ingredients.shapes, target, model, arranged)
    target = _tied(model, _with_slots(target, arranged, names, ingredients), names.fed, dtensors)
    target = {name: _divided(t, mine[name]) if name in dtensors else t for name, t in target.items()}
    rules = [
        *_drops(model, names.unknown, ingredients),
        *_routes(arranged, names, ingredients),
        *_joins(arranged, ingredients),
    ]
    ignored = internals.ignored_when_missing(model)
    may_miss = tuple(n for n in target if ignored is not None and ignored.search(n) and "{" not in n)
    return Adapted(target, RuleSet(*rules), partial(finish, mapping), may_miss, names.notes, catalogue)


@dataclass
class _Names:
    """What becomes of the names of a checkpoint, as transformers would have written it.

    plain: name to parameter. groups: names that go through a converter, by its first target. unknown: names that
    the model has no use for.
    """

    plain: dict[str, str] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, mapping: Sequence[Any], ingredients: Ingredients, target: Target) -> _Names:
        """Rename every tensor as transformers does."""
        names = cls()
        rename = internals.renamer(model, mapping, target)
        bare = _unwrapped(ingredients.of, target, names)
        for short in internals.natural_order(bare):
            renamed, converter, pattern = rename(short)
            whole = not ingredients.slots_of(bare[short])  # else it is for us to say where its parts go
            names._note(bare[short], renamed, converter if whole else None, pattern, target)
        return names

    def _note(self, name: str, renamed: str, converter: Any, pattern: str, target: Target) -> None:
        if "{" in name or renamed not in target:
            self.unknown.append(name)
        elif converter is None:
            self.plain[name] = renamed
        else:
            group = self.groups.setdefault(renamed, Group(converter, renamed))
            group.entries[pattern].append(name)

    @property
    def fed(self) -> set[str]:
        """The parameters that something is meant for."""
        return {*self.plain.values(), *self.groups}


def _unwrapped(given: Collection[str], target: Target, names: _Names) -> Mapping[str, str]:
    """Return the given names by what they are without what wrappers put before them."""
    found = unwrapping(given, target.keys())
    if found is None:
        return {name: name for name in given}
    names.notes = (stripping_told(found[1]),)
    routes = {name: found[0].route(name) for name in given}
    return {route.to[0].into if route else name: name for name, route in routes.items()}


def _with_slots(target: Target, arranged: Arrangement, names: _Names, ingredients: Ingredients) -> Target:
    slots: dict[str, Mapping[str, Slot]] = {into: ingredients.slots_of(name) for name, into in names.plain.items()}
    slots = {name: found for name, found in slots.items() if found} | arranged.slots
    return {name: replace(t, slots=slots[name]) if name in slots else t for name, t in target.items()}


def _routes(arranged: Arrangement, names: _Names, ingredients: Ingredients) -> Iterator[Rule]:
    """Yield a rule for each entry that is more than the parameter of its own name."""
    parts: dict[str, list[Part]] = defaultdict(list)
    for name, into in names.plain.items():
        for ingredient in ingredients.of_name(name):
            parts[ingredient.entry].append(Part(into, ingredient.slot, ingredient.via))
    for name, some in arranged.parts.items():
        for ingredient in ingredients.of_name(name):
            parts[ingredient.entry] += [replace(part, via=chained(ingredient.via, part.via)) for part in some]
    for entry, found in parts.items():
        if len(found) > 1:
            yield Split(entry, tuple(found))
        elif found[0] != Part(entry):
            yield Place(entry, found[0].into, found[0].slot, found[0].via)


def _joins(arranged: Arrangement, ingredients: Ingredients) -> Iterator[Rule]:
    """Yield the joins with the entries that their names come from. Raises ConfigError for a part of an entry."""
    for join in arranged.joins:
        found = [ingredients.of_name(name) for name in join.sources]
        if any(len(some) != 1 or some[0] != Ingredient(some[0].entry) for some in found):
            raise ConfigError(f"{join.into}: {join.via} of transformers takes whole tensors, and the file has others")
        yield replace(join, sources=tuple(some[0].entry for some in found))


def _undivided(target: Target, name: str) -> TargetTensor:
    """Return a DTensor as a rank would need it that had all of it: what converters make is told of whole tensors."""
    slot = target[owner_of(target, name)].slots[""]
    tensor = replace(target[name], shape=slot.logical)
    return (
        tensor if tensor.alias_of is not None else replace(tensor, slots={"": Slot.whole(slot.logical, also=slot.also)})
    )


def _divided(tensor: TargetTensor, mine: TargetTensor) -> TargetTensor:
    """Return a DTensor as this rank needs it, which has the window of `mine`."""
    if tensor.alias_of is not None:
        return replace(tensor, shape=mine.shape)
    return divided(tensor, mine.slots[""].window, mine.shape)


def _tied(model: nn.Module, target: Target, fed: set[str], dtensors: Mapping[str, object]) -> Target:
    """Return `target` with the ties that the configuration asks for; a name that the checkpoint has owns the tensor.

    Only tensors on meta are tied: what has values is as its owner wants it. dtensors: how they lie on the ranks; those
    that lie otherwise cannot share their memory.
    """
    on_meta = {p.name for p in places(model) if p.tensor.device.type == "meta"}
    tied = dict(target)
    for names in _families(internals.tied_names(model)):
        members = [n for n in names if n in on_meta and n in target and target[n].alias_of is None]
        owner = next((n for n in members if n in fed), members[0] if members else "")
        for name in members:
            alike = target[name].shape == target[owner].shape and dtensors.get(name) == dtensors.get(owner)
            if name != owner and alike:
                tied[name] = replace(target[name], alias_of=owner, slots={})
    return tied


def _families(ties: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield names that share one tensor, the one that the others are tied to first."""
    families: dict[str, list[str]] = {}
    for name, source in ties.items():
        seen = {name}
        while source in ties and source not in seen:
            seen.add(source)
            source = ties[source]
        families.setdefault(source, [source]).append(name)
    yield from families.values()


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def _drops(model: nn.Module, unknown: Iterable[str], ingredients: Ingredients) -> Iterator[Rule]:
    """Yield rules for entries that the model is known to do without: layers that only draft, and what its class says.

    Draft layers come after the others in the same numbering, as many as the configuration says.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    drafts = getattr(text, "num_nextn_predict_layers", None)
    ignored = internals.ignored_when_unexpected(model)
    yield from ingredients.rules
    for name in unknown:
        layer = _LAYER.search(name)
        if "{" in name:
            continue
        if layer is not None and isinstance(layers, int) and isinstance(drafts, int) and int(layer[1]) >= layers:
            if int(layer[1]) < layers + drafts:
                yield from _dropped(
                    ingredients.of[name], f"draft: layer {layer[1]} comes after the {layers} layers of the model"
                )
        elif ignored is not None and ignored.search(name):
            yield from _dropped(ingredients.of_name(name), f"{type(model).__name__} of transformers has no use for it")


def _dropped(ingredients: Iterable[Ingredient], why: str) -> Iterator[Rule]:
    return (Drop(ingredient.entry, why) for ingredient in ingredients)
