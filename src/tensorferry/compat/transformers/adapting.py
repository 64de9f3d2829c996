"""How a transformers model is filled from a checkpoint: its target, with its ties, and rules for every name.

Names are renamed by transformers' own mapping; what converters do is worked out in `conversions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from tensorferry.compat.transformers import internals
from tensorferry.compat.transformers.conversions import Group, Layout, lay_out
from tensorferry.compat.transformers.finishing import finish
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.rules import Drop, Place, Rule, Split
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Target
from tensorferry.core.wrappers import unwrapping
from tensorferry.modules.adapters import Adapted
from tensorferry.modules.describe import describe, places

__all__ = ["adapt"]


def adapt(model: nn.Module, catalogue: Catalogue) -> Adapted | None:
    """Return how `model` is filled from `catalogue`; see `tensorferry.modules.adapters.Adapter`.

    None for a module that is no `PreTrainedModel`, such as a single layer of one.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    target = describe(model)
    mapping = internals.mapping_of(model)
    names = _Names.of(model, mapping, catalogue, target)
    shapes = {entry.name: entry.shape for entry in catalogue.values()}
    layout = Layout()
    for group in names.groups.values():
        lay_out(group, shapes, target, model, layout)
    target = _tied(model, _with_slots(target, layout), names.fed)
    rules = [*_drops(model, names.unknown), *names.places(), *_routes(layout), *layout.joins]
    ignored = internals.ignored_when_missing(model)
    may_miss = tuple(n for n in target if ignored is not None and ignored.search(n) and "{" not in n)
    return Adapted(target, RuleSet(*rules), partial(finish, mapping), may_miss, names.notes)


@dataclass
class _Names:
    """What becomes of the names of a checkpoint.

    plain: entry to parameter. groups: entries that go through a converter, by its first target. unknown: entries that
    the model has no use for.
    """

    plain: dict[str, str] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, mapping: Sequence[Any], catalogue: Catalogue, target: Target) -> _Names:
        """Rename every entry as transformers does."""
        names = cls()
        rename = internals.renamer(model, mapping, target)
        bare = _unwrapped(catalogue, target, names)
        for short in internals.natural_order(bare):
            renamed, converter, pattern = rename(short)
            names._note(bare[short], renamed, converter, pattern, target)
        return names

    def _note(self, entry: str, renamed: str, converter: Any, pattern: str, target: Target) -> None:
        if "{" in entry or renamed not in target:
            self.unknown.append(entry)
        elif converter is None:
            self.plain[entry] = renamed
        else:
            group = self.groups.setdefault(renamed, Group(converter, renamed))
            group.entries[pattern].append(entry)

    @property
    def fed(self) -> set[str]:
        """The parameters that an entry is meant for."""
        return {*self.plain.values(), *self.groups}

    def places(self) -> Iterator[Rule]:
        """Yield a rule for each entry whose name is not the parameter's."""
        for entry, name in self.plain.items():
            if entry != name:
                yield Place(entry, name)


def _unwrapped(catalogue: Catalogue, target: Target, names: _Names) -> Mapping[str, str]:
    """Return the entries by their names without what wrappers put before them."""
    found = unwrapping(catalogue, target.keys())
    if found is None:
        return {name: name for name in catalogue}
    names.notes = (f"the prefix {found[1]} that a wrapper left on every name was stripped",)
    routes = {name: found[0].route(name) for name in catalogue}
    return {route.to[0].into if route else name: name for name, route in routes.items()}


def _with_slots(target: Target, layout: Layout) -> Target:
    return {n: replace(t, slots=layout.slots[n]) if n in layout.slots else t for n, t in target.items()}


def _routes(layout: Layout) -> Iterator[Rule]:
    for entry, parts in layout.parts.items():
        yield (
            Place(entry, parts[0].into, parts[0].slot, parts[0].via) if len(parts) == 1 else Split(entry, tuple(parts))
        )


def _tied(model: nn.Module, target: Target, fed: set[str]) -> Target:
    """Return `target` with the ties that the configuration asks for; a name that the checkpoint has owns the tensor.

    Only tensors on meta are tied: what has values is as its owner wants it.
    """
    on_meta = {p.name for p in places(model) if p.tensor.device.type == "meta"}
    tied = dict(target)
    for names in _families(internals.tied_names(model)):
        members = [n for n in names if n in on_meta and n in target and target[n].alias_of is None]
        owner = next((n for n in members if n in fed), members[0] if members else "")
        for name in members:
            if name != owner and target[name].shape == target[owner].shape:
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


def _drops(model: nn.Module, unknown: Iterable[str]) -> Iterator[Rule]:
    """Yield rules for entries that the model is known to do without: layers that only draft, and what its class says.

    Draft layers come after the others in the same numbering, as many as the configuration says.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    drafts = getattr(text, "num_nextn_predict_layers", None)
    ignored = internals.ignored_when_unexpected(model)
    for name in unknown:
        layer = _LAYER.search(name)
        if "{" in name:
            continue
        if layer is not None and isinstance(layers, int) and isinstance(drafts, int) and int(layer[1]) >= layers:
            if int(layer[1]) < layers + drafts:
                yield Drop(name, f"draft: layer {layer[1]} comes after the {layers} layers of the model")
        elif ignored is not None and ignored.search(name):
            yield Drop(name, f"{type(model).__name__} of transformers has no use for it")
