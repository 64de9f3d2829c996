"""Deciding ties by what a checkpoint really holds, before anything is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, Target, TargetTensor

__all__ = ["settle_ties"]


def settle_ties(
    catalogue: Catalogue, target: Target, rules: RuleSet, same: Callable[[TensorEntry, TensorEntry], bool]
) -> tuple[Target, list[str]]:
    """Return `target` with ties taken apart where the checkpoint has different values, and what to tell of it.

    same: whether two entries hold the same values; only asked where a checkpoint holds both names of a tie.
    """
    aliases = [t for t in target.values() if t.alias_of is not None]
    if not aliases:
        return target, []
    sources = _sources(catalogue, rules, {t.name for t in aliases} | {t.alias_of for t in aliases if t.alias_of})
    settled, notes = dict(target), []
    for tensor in aliases:
        owner = tensor.alias_of or ""
        mine = sources.get(tensor.name)
        # Where the owner's own name is not there, the first of its aliases that is there fills it.
        theirs = sources.setdefault(owner, mine) if mine is not None else None
        if mine is None or theirs is None or mine is theirs or same(mine, theirs):
            continue
        settled[tensor.name] = _untied(tensor)
        notes.append(
            f"the model ties {tensor.name} to {owner}, but the checkpoint holds different values for them: "
            "both are loaded, untied"
        )
    return settled, notes


def _sources(catalogue: Catalogue, rules: RuleSet, wanted: set[str]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for entry in catalogue.values():
        route = rules.route(entry.name)
        names = [d.into for d in route.to] if route is not None else [entry.name]
        for name in names:
            if name in wanted:
                found.setdefault(name, entry)
    return found


def _untied(tensor: TargetTensor) -> TargetTensor:
    return replace(tensor, alias_of=None, slots={"": Slot.whole(tensor.shape)})
