"""Folding, rules and look-ups for random names."""

from __future__ import annotations

import itertools
import re

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tensorferry.core.names import fold, natural_key, nearest
from tensorferry.core.rules import Drop, Ignore, Place, Rule, compiled, sources
from tensorferry.core.ruleset import Route, RuleSet
from tensorferry.errors import RuleError

EXAMPLES = settings(max_examples=400, deadline=None)

components = st.sampled_from(["0", "1", "2", "10", "07", "a", "b", "w1", "1a", "a0", "*", "", "99", "x-1"])
names = st.lists(components, min_size=1, max_size=5).map(".".join)


def expanded(text: str) -> list[str]:
    """Write out what a folded text stands for."""
    pieces = re.split(r"\{([^}]*)\}", text)
    choices = [[p] if i % 2 == 0 else list(_listed(p)) for i, p in enumerate(pieces)]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _listed(inner: str) -> list[str]:
    out = []
    for part in inner.split(","):
        first, _, last = part.partition("..")
        out += [str(n) for n in range(int(first), int(last or first) + 1)]
    return out


@EXAMPLES
@given(st.lists(names, max_size=40))
def test_folding_claims_no_name_that_is_not_there_and_loses_none(some: list[str]) -> None:
    folded = fold(some)
    assert sorted(n for f in folded for n in f.names) == sorted(set(some))
    for f in folded:
        assert sorted(expanded(f.text)) == sorted(f.names)


@EXAMPLES
@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_folding_layers_and_experts_is_exact(points: set[tuple[int, int]]) -> None:
    some = [f"l.{i}.e.{j}.w" for i, j in points]
    assert sorted(n for f in fold(some) for n in expanded(f.text)) == sorted(some)


@EXAMPLES
@given(st.lists(st.integers(0, 10**20), unique=True))
def test_natural_order_is_that_of_numbers(numbers: list[int]) -> None:
    assert sorted((f"h.{n}" for n in numbers), key=natural_key) == [f"h.{n}" for n in sorted(numbers)]


@EXAMPLES
@given(names, st.lists(names, max_size=8))
def test_what_is_offered_is_always_there_and_never_the_name_itself(name: str, candidates: list[str]) -> None:
    offered = nearest(name, candidates)
    assert set(offered) <= set(candidates) - {name}
    assert len(offered) == len(set(offered)) <= 3


KINDS = st.sampled_from(["{}", "{}", "{}:part", "{}:path", "x{}", "{}0", "1{}", "{}{}", "{}:partx", "lit", "lit"])


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """Literal numbers, whole placeholders, and placeholders stuck into words or to each other."""
    free = iter("ijklmnop")
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(
            st.sampled_from(["{}", "{}", "{}:part", "{}:path", "x{}", "{}0", "1{}", "{}{}", "{}:partx", "lit", "lit"])
        )
        if kind == "lit":
            parts.append(draw(components))
            continue
        text = ""
        for piece in re.findall(r"\{\}(?::path|:part)?|.", kind):
            text += "{" + next(free) + piece[2:] + "}" if piece.startswith("{") else piece
        parts.append(text)
    return ".".join(parts)


@st.composite
def rule_lists(draw: st.DrawFn) -> list[Rule]:
    rules: list[Rule] = []
    for n in range(draw(st.integers(1, 6))):
        source = draw(patterns())
        rules.append(Drop(source, f"rule {n}") if draw(st.booleans()) else Ignore(source, f"rule {n}"))
    return rules


def scanned(rules: list[Rule], name: str) -> Route | None:
    """Ask every pattern in order."""
    for rule in rules:
        if any(compiled(source).fullmatch(name) for source in sources(rule)):
            assert isinstance(rule, Drop | Ignore)
            return Route(dropped=rule.why) if isinstance(rule, Drop) else Route(ignorable=rule.why)
    return None


@settings(max_examples=400, deadline=None)
@given(rule_lists(), st.lists(names, min_size=1, max_size=12))
def test_looking_up_by_shape_gives_what_asking_every_rule_gives(rules: list[Rule], some: list[str]) -> None:
    looked_up = RuleSet(*rules)
    for name in [*some, *some]:
        assert looked_up.route(name) == scanned(rules, name), name


@st.composite
def renamings(draw: st.DrawFn) -> tuple[RuleSet, list[str]]:
    """Rules that each rename under a prefix of their own, and names that they match."""
    rules, some = [], []
    for n in range(draw(st.integers(1, 4))):
        middle = draw(st.permutations(["{i}", "{x:part}", "w"]))
        other = draw(st.permutations(["{i}", "{x}", "v"]))
        rules.append(Place(f"old{n}." + ".".join(middle), f"new{n}." + ".".join(other)))
        values = {"{i}": draw(st.sampled_from(["0", "12"])), "{x:part}": draw(st.sampled_from(["a", "3", "q-b"]))}
        some.append(f"old{n}." + ".".join(values.get(m, m) for m in middle))
    return RuleSet(*rules), some


@EXAMPLES
@given(renamings())
def test_renaming_and_back_gives_the_name(case: tuple[RuleSet, list[str]]) -> None:
    rules, some = case
    back = rules.inverse()
    for name in some:
        there = rules.route(name)
        assert there is not None
        again = back.route(there.to[0].into)
        assert again is not None
        assert again.to[0].into == name
    assert back.inverse().rules == rules.rules


@EXAMPLES
@given(st.text("a.{}i:xpath", max_size=12), names)
def test_any_text_is_a_pattern_or_is_refused(text: str, name: str) -> None:
    try:
        rules = RuleSet(Drop(text, "why"))
    except RuleError:
        assume(False)
    assert rules.route(name) in (None, Route(dropped="why"))
