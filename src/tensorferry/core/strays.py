"""Entries that lead nowhere, and the parameters that were probably meant: what planning says of misspelt rules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from tensorferry.core.amounts import few
from tensorferry.core.names import nearest
from tensorferry.core.target import TargetTensor

__all__ = ["Strays", "listed", "suggestions"]

_NUMBERS = re.compile("[0-9]+")
_STAR = re.compile(r"\*")
_MOST_SUGGESTIONS = 100
"""For how many sorts of missing names one is looked for that may have been meant; no message shows more."""
_SHOWN = 4


class Strays:
    """What rules send to places that do not exist, in the words for both ends: the entry and the parameter."""

    def __init__(self) -> None:
        self._misplaced: dict[str, dict[str, str]] = defaultdict(dict)
        self._lost: dict[str, str] = {}
        self._told: set[str] = set()

    def lost(self, entry: str, into: str) -> str:
        """Note that a rule sends `entry` to a parameter that the model lacks; return what to say of the entry."""
        if into == entry:
            return ""
        if not entry.endswith(into):  # a rule that only strips a prefix spells nothing
            self._lost[entry] = into
        return f"a rule sends it to {into}, which the model does not have"

    def misplaced(self, entry: str, tensor: TargetTensor, slot: str) -> str:
        """Note that a rule sends `entry` to a slot that `tensor` lacks; return what to say of the entry."""
        self._misplaced[tensor.name].setdefault(slot, entry)
        where = f"slot {slot!r} of {tensor.name}" if slot else f"{tensor.name} without a slot"
        return f"a rule sends it to {where}, {_what_it_has(tensor, 'which')}"

    def meant_for(self, tensor: TargetTensor) -> list[str]:
        """Return what was sent to slots that `tensor` lacks, as one clause, if anything was."""
        found = self._misplaced.get(tensor.name)
        if not found:
            return []
        sent = [f"{entry} to {f'its slot {slot!r}' if slot else 'it without a slot'}" for slot, entry in found.items()]
        verb = "a rule sends" if len(sent) == 1 else "rules send"
        return [f"{verb} {few(sent, _SHOWN)}, {_what_it_has(tensor, 'and it')}"]

    def spelt_like(self, missing: Sequence[str]) -> Mapping[str, str]:
        """Return, for missing parameters, what a rule sends to a name like theirs, as one clause."""
        entries: dict[str, str] = {}
        for entry, into in self._lost.items():
            entries.setdefault(into, entry)
        out = {}
        for name, near in suggestions(missing if entries else (), list(entries)).items():
            if near:
                self._told.add(near[0])
                out[name] = f"a rule sends {entries[near[0]]} to {near[0]}, which the model does not have"
        return out

    def untold(self, entry: str) -> bool:
        """Whether `entry` is sent to a parameter that the model lacks, of which no missing parameter tells."""
        return entry in self._lost and self._lost[entry] not in self._told


def listed(slots: Iterable[str]) -> str:
    """Return the first names of slots, quoted."""
    return few(map(repr, slots), _SHOWN)


def _what_it_has(tensor: TargetTensor, subject: str) -> str:
    named = [slot for slot in tensor.slots if slot]
    if not named:
        return f"{subject} has no slots: send whole entries to it without a slot"
    return f"{subject} has only {listed(named)}"


def suggestions(missing: Sequence[str], spare: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return, for missing names, spare ones they may be in the checkpoint; looked up once per shape of name."""
    have = set(spare)
    known = {_NUMBERS.sub("*", name): name for name in reversed([*spare])}
    found: dict[str, tuple[str, ...]] = {}
    out = {}
    for name in missing:
        shape = _NUMBERS.sub("*", name)
        if shape not in found:
            found[shape] = nearest(shape, known) if len(found) < _MOST_SUGGESTIONS else ()
        numbers = _NUMBERS.findall(name)
        written = (_with_numbers(template, numbers) for template in found[shape])
        out[name] = tuple(w for w in written if w in have)
    return out


def _with_numbers(template: str, numbers: Sequence[str]) -> str:
    left = iter(numbers)
    return _STAR.sub(lambda star: next(left, star[0]), template)
