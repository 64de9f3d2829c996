"""Where each tensor of a transformers checkpoint comes from: an entry of its name, or another layout's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensorferry.compat.consolidated.naming import MODEL_TYPES
from tensorferry.compat.foreign import foreign_naming
from tensorferry.compat.gguf.naming import architecture_of
from tensorferry.compat.translation import Naming
from tensorferry.core.boxes import Shape
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.rules import Drop, Ignore, Rule
from tensorferry.core.target import Slot
from tensorferry.core.transforms import TensorSpec, Transform

__all__ = ["Ingredient", "Ingredients"]

_NUMBERS = DTYPES["F32"]


class Ingredient(NamedTuple):
    """An entry that a tensor of a transformers checkpoint is made of, or the part `slot` of it."""

    entry: str
    slot: str = ""
    via: Transform | None = None


@dataclass(frozen=True)
class Ingredients:
    """What the entries of a checkpoint are to transformers.

    of: by the name that transformers' own checkpoints have. shapes: by the same names, what `via` makes of the entry.
    rules: for entries that no tensor is made of.
    """

    of: Mapping[str, Sequence[Ingredient]]
    shapes: Mapping[str, Shape]
    rules: Sequence[Rule] = ()
    names: Naming | None = field(default=None)

    @classmethod
    def find(cls, catalogue: Catalogue, config: Any) -> Ingredients:
        """Return the ingredients in `catalogue` for a model of `config`. Raises ConfigError."""
        names = _naming(catalogue, config)
        if names is None:
            same = {name: (Ingredient(name),) for name in catalogue}
            return cls(same, {entry.name: entry.shape for entry in catalogue.values()})
        return _translated(catalogue, names)

    def of_name(self, name: str) -> Sequence[Ingredient]:
        """Return what a tensor is made of; for a name that should be there and is not, an entry of that name."""
        return self.of.get(name) or (Ingredient(name),)

    def slots_of(self, name: str) -> Mapping[str, Slot]:
        """Return the slots of a tensor that several entries make up, or that has other shapes too."""
        return self.names.slots_of(name) if self.names is not None else {}


def _naming(catalogue: Catalogue, config: Any) -> Naming | None:
    """Return how the entries are called in transformers' checkpoints; None where those are their names."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if architecture_of(catalogue) is None and text.model_type not in MODEL_TYPES:
        return None
    return foreign_naming(catalogue, text.to_dict())


def _translated(catalogue: Catalogue, names: Naming) -> Ingredients:
    ingredients: dict[str, list[Ingredient]] = defaultdict(list)
    shapes: dict[str, Shape] = {}
    rules: list[Rule] = []
    for entry in catalogue.values():
        route = names.rules.route(entry.name)
        if route is not None and route.ignorable is not None:
            rules.append(Ignore(entry.name, route.ignorable))
        elif route is not None and route.dropped is not None:
            rules.append(Drop(entry.name, route.dropped))
        elif route is None:
            ingredients[entry.name].append(Ingredient(entry.name))
            shapes[entry.name] = entry.shape
        else:
            for to in route.to:
                ingredients[to.into].append(Ingredient(entry.name, to.slot, to.via))
                shapes[to.into] = _made(entry, to.via)
    return Ingredients(ingredients, shapes, rules, names)


def _made(entry: TensorEntry, via: Transform | None) -> Shape:
    """Return the shape that comes out, of numbers; that of the entry where it does not fit, which planning will say."""
    try:
        return entry.shape if via is None else via.infer([TensorSpec(_NUMBERS, entry.shape)]).shape
    except ValueError:
        return entry.shape
