"""Deciding ties by what a checkpoint really holds, before anything is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.ruleset import Destination, RuleSet
from tensorferry.core.target import Target, TargetTensor, owner_of

__all__ = ["settle_ties"]


_Part = tuple[str, tuple[int, ...] | None]
"""The slot that an entry feeds, and which of the inputs that are joined into it the entry is."""


def settle_ties(
    catalogue: Catalogue, target: Target, rules: RuleSet, same: Callable[[TensorEntry, TensorEntry], bool]
) -> tuple[Target, list[str]]:
    """Return `target` with ties taken apart where the checkpoint has different values, and what to tell of it.

    same: whether two entries hold the same values; only asked where a checkpoint holds several names of a tie. A
    tensor that is untied takes entries as its owner did.
    """
    owners = {t.name: owner_of(target, t.name) for t in target.values() if t.alias_of is not None}
    if not owners:
        return target, []
    sources = _sources(catalogue, rules, {*owners, *owners.values()})
    settled, notes = dict(target), []
    for name, owner in owners.items():
        mine = sources.get(name)
        if mine is None:
            continue
        # Where the owner's own name is not there, the first of its aliases that is there fills it.
        theirs = sources.setdefault(owner, mine)
        if all(theirs.get(part, entry) is entry or same(entry, theirs[part]) for part, entry in mine.items()):
            continue
        settled[name] = _untied(target[name], target[owner])
        notes.append(
            f"the model ties {name} to {owner}, but the checkpoint holds different values for them: "
            "both are loaded, untied"
        )
    return settled, notes


def _sources(catalogue: Catalogue, rules: RuleSet, wanted: set[str]) -> dict[str, dict[_Part, TensorEntry]]:
    found: dict[str, dict[_Part, TensorEntry]] = {}
    for entry in catalogue.values():
        route = rules.route(entry.name)
        for to in route.to if route is not None else (Destination(entry.name, "", None),):
            if to.into in wanted:
                found.setdefault(to.into, {}).setdefault((to.slot, to.order), entry)
    return found


def _untied(tensor: TargetTensor, owner: TargetTensor) -> TargetTensor:
    return replace(tensor, alias_of=None, slots=owner.slots, default=owner.default, absent=owner.absent)
