"""Applying rules to names, quickly: tens of thousands of names share a few dozen shapes, decided once each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import NamedTuple

from tensorferry.core import rules as r
from tensorferry.core.names import fold
from tensorferry.core.rules import Drop, Ignore, Join, Part, Rule
from tensorferry.core.transforms import Transform

__all__ = ["COMMON_LEFTOVERS", "Destination", "Route", "RuleSet"]

_INNER_NUMBER = re.compile(r"\.([0-9]{1,18})(?=\.)")


class Destination(NamedTuple):
    """Where a name goes. For joins, `order` is the position of its source, then its free numbers, and `sources`
    is how many sources there are.
    """

    into: str
    slot: str
    via: Transform | None
    order: tuple[int, ...] | None = None
    sources: int = 1


class Route(NamedTuple):
    """What the rules say of a name: destinations, or why it is dropped, or why it may be ignored."""

    to: tuple[Destination, ...] = ()
    dropped: str | None = None
    ignorable: str | None = None


class RuleSet:
    """Rules in order; the first whose source matches a name decides. Immutable."""

    __slots__ = ("_exact", "_fixed", "_memo", "_patterns", "_routers", "_stand_in", "rules")

    def __init__(self, *rules: Rule) -> None:
        r.check(rules)
        self.rules = rules
        self._exact: dict[str, tuple[int, int]] = {}
        self._patterns: list[tuple[int, int, re.Pattern[str]]] = []
        for n, rule in enumerate(rules):
            for k, source in enumerate(r.sources(rule)):
                if r.placeholders(source):
                    self._patterns.append((n, k, r.compiled(source)))
                else:
                    self._exact.setdefault(source, (n, k))
        self._fixed = _fixed_numbers(pattern for rule in rules for pattern in r.sources(rule))
        self._stand_in = "." + next(str(n) for n in count() if str(n) not in (self._fixed or ()))
        self._routers: dict[tuple[int, int], Callable[[str], Route]] = {}
        self._memo: dict[str, tuple[int, int] | None] = {}

    def __or__(self, other: RuleSet) -> RuleSet:
        return RuleSet(*self.rules, *other.rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RuleSet) and self.rules == other.rules

    def __hash__(self) -> int:
        return hash(self.rules)

    def __repr__(self) -> str:
        return f"RuleSet({', '.join(map(repr, self.rules))})"

    def under(self, prefix: str) -> RuleSet:
        """Return the same rules for names below `prefix` (with its dot), on both sides."""
        return RuleSet(*(r.under(rule, prefix) for rule in self.rules))

    def inverse(self) -> RuleSet:
        """Return the rules that lead back from parameters to entries; raises RuleError if one cannot be undone."""
        return RuleSet(*(r.inverse(rule) for rule in self.rules if not r.discards(rule)))

    def route(self, name: str) -> Route | None:
        """Return what the first matching rule says of `name`, or None where no rule matches."""
        found = self._find(name)
        if found is None:
            return None
        try:
            router = self._routers[found]
        except KeyError:
            router = self._routers[found] = _router(self.rules[found[0]], found[1])
        return router(name)

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the sources that decide for none of `names`, in order; of rules that only discard, that match none."""
        left = {(n, k): s for n, rule in enumerate(self.rules) for k, s in enumerate(r.sources(rule))}
        seen = [*names]
        for name in seen:
            left.pop(self._find(name) or (-1, -1), None)
        shadowed = {
            at for at, s in left.items() if r.discards(self.rules[at[0]]) and any(map(r.compiled(s).fullmatch, seen))
        }
        return [source for at, source in left.items() if at not in shadowed]

    def explain(self, names: Iterable[str]) -> list[str]:
        """Return one line for each kind of name: what becomes of it, layer numbers folded.

        >>> RuleSet(r.Place("h.{i}.w", "layers.{i}.weight")).explain(["h.0.w", "h.1.w", "x"])
        ['h.{0,1}.w -> layers.*.weight', 'x -> x (no rule)']
        """
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(_said(self.route(name)), []).append(name)
        return [
            f"{folded.text} -> {said or f'{folded.text} (no rule)'}"
            for said, members in groups.items()
            for folded in fold(members)
        ]

    def _find(self, name: str) -> tuple[int, int] | None:
        exact = self._exact.get(name) if self._exact else None
        found = self._find_pattern(name) if self._patterns else None
        if exact is None or found is None:
            return exact or found
        return min(exact, found)

    def _find_pattern(self, name: str) -> tuple[int, int] | None:
        if self._fixed is None:
            return self._scan(name)
        shape = self._shape(name)
        try:
            return self._memo[shape]
        except KeyError:
            found = self._memo[shape] = self._scan(shape)
            return found

    def _scan(self, name: str) -> tuple[int, int] | None:
        return next(((n, k) for n, k, pattern in self._patterns if pattern.fullmatch(name)), None)

    def _shape(self, name: str) -> str:
        """Return a name that matches the same patterns, the same one for all layers that the rules treat alike."""
        if not self._fixed:
            return _INNER_NUMBER.sub(self._stand_in, name)
        fixed, stand_in = self._fixed, self._stand_in
        return _INNER_NUMBER.sub(lambda m: m[0] if m[1] in fixed else stand_in, name)


def _fixed_numbers(patterns: Iterable[str]) -> frozenset[str] | None:
    every: set[str] = set()
    for pattern in patterns:
        if r.placeholders(pattern):
            fixed = r.fixed_numbers(pattern)
            if fixed is None:
                return None
            every |= fixed
    return frozenset(every)


def _router(rule: Rule, source: int) -> Callable[[str], Route]:
    """Return what tells, of a name that matched one source of a rule, where it goes."""
    match rule:
        case Drop(_, why):
            return _always(Route(dropped=why))
        case Ignore(_, why):
            return _always(Route(ignorable=why))
    text = r.sources(rule)[source]
    makers = [_maker(rule, source, part) for part in r.destinations(rule)]
    if not r.placeholders(text):
        return _always(Route(tuple(make({}) for make in makers)))
    pattern = r.compiled(text)

    def router(name: str) -> Route:
        matched = pattern.fullmatch(name)
        values = matched.groupdict() if matched else {}
        return Route(tuple([make(values) for make in makers]))

    return router


def _always(route: Route) -> Callable[[str], Route]:
    return lambda name: route


def _maker(rule: Rule, source: int, part: Part) -> Callable[[Mapping[str, str]], Destination]:
    into, slot = r.format_of(part.into), r.format_of(part.slot)
    if not isinstance(rule, Join):
        return lambda values: Destination(into.format_map(values), slot.format_map(values), part.via)
    numbers, sources = r.open_numbers(rule), len(rule.sources)

    def make(values: Mapping[str, str]) -> Destination:
        order = (source, *(int(values[name]) for name in numbers))
        return Destination(into.format_map(values), slot.format_map(values), part.via, order, sources)

    return make


def _said(route: Route | None) -> str:
    if route is None:
        return ""
    if route.dropped or route.ignorable:
        return f"dropped: {route.dropped or route.ignorable}"
    return ", ".join(
        _INNER_NUMBER.sub(".*", d.into) + (f"[{d.slot}]" if d.slot else "") + (f" via {d.via.op}" if d.via else "")
        for d in route.to
    )


_COMPUTED = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "rope.freqs", "position_ids", "masked_bias")

COMMON_LEFTOVERS = RuleSet(
    *(Ignore(prefix + name, "the model computes it") for name in _COMPUTED for prefix in ("", "{x:path}.")),
    *(Ignore(prefix + "num_batches_tracked", "a training statistic") for prefix in ("", "{x:path}.")),
)
"""Tensors that old checkpoints carry and models compute; never copied over what a model has."""
