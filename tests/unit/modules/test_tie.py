"""Ties are decided by what the checkpoint holds: equal values stay tied, different ones are loaded apart."""

from __future__ import annotations

import pytest

from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.rules import Part, Place, Split
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, Target, TargetTensor
from tensorferry.modules.tie import settle_ties

F32 = DTYPES["F32"]
WINDOW = Slot(Region((2, 2), Box((0, 0), (2, 2))), (6, 2), Region((6, 2), Box((2, 0), (4, 2))))

TARGET: Target = {
    "embed": TargetTensor("embed", F32, (2, 2), {"": WINDOW}, default=0.0),
    "head": TargetTensor("head", F32, (2, 2), alias_of="embed"),
    "draft": TargetTensor("draft", F32, (2, 2), alias_of="head"),
}


def _settled(values: dict[str, int], rules: RuleSet | None = None) -> tuple[Target, list[str], list[tuple[str, str]]]:
    """Settle the ties of a checkpoint in which entries are equal exactly where their numbers are."""
    catalogue = Catalogue([TensorEntry.at(n, F32, (6, 2), "f", 0) for n in values], format="test")
    asked: list[tuple[str, str]] = []

    def same(a: TensorEntry, b: TensorEntry) -> bool:
        asked.append((a.name, b.name))
        return values[a.name] == values[b.name]

    target, notes = settle_ties(catalogue, TARGET, rules or RuleSet(), same)
    return target, notes, asked


def _aliases(target: Target) -> dict[str, str | None]:
    return {name: tensor.alias_of for name, tensor in target.items()}


TIED = {"embed": None, "head": "embed", "draft": "head"}


def test_a_model_without_ties_is_left_as_it_is_and_nothing_is_compared() -> None:
    target = {"embed": TARGET["embed"]}
    catalogue = Catalogue([TensorEntry.at("embed", F32, (6, 2), "f", 0)], format="test")
    assert settle_ties(catalogue, target, RuleSet(), lambda a, b: pytest.fail("compared")) == (target, [])


@pytest.mark.parametrize("names", [["embed"], ["head"], ["draft"], []])
def test_nothing_is_compared_where_the_checkpoint_has_one_of_them(names: list[str]) -> None:
    target, notes, asked = _settled(dict.fromkeys(names, 1))
    assert (_aliases(target), notes, asked) == (TIED, [], [])


def test_equal_values_stay_tied() -> None:
    target, notes, asked = _settled({"embed": 1, "head": 1})
    assert (_aliases(target), notes) == (TIED, [])
    assert asked == [("head", "embed")]


def test_different_values_are_untied_with_a_note() -> None:
    target, notes, _ = _settled({"embed": 1, "head": 2})
    assert target["head"].alias_of is None
    assert notes == [
        "the model ties head to embed, but the checkpoint holds different values for them: both are loaded, untied"
    ]


def test_what_is_untied_is_laid_out_as_its_owner() -> None:
    target, _, _ = _settled({"embed": 1, "head": 2})
    assert target["head"].slots == {"": WINDOW}
    assert target["head"].default == 0.0


def test_a_tie_to_a_tie_is_compared_with_the_owner_of_both() -> None:
    target, _, asked = _settled({"embed": 1, "draft": 2})
    assert target["draft"].alias_of is None
    assert asked == [("draft", "embed")]


def test_aliases_are_compared_with_each_other_where_the_owner_is_absent() -> None:
    target, notes, asked = _settled({"head": 1, "draft": 2})
    assert asked == [("draft", "head")]
    assert (target["head"].alias_of, target["draft"].alias_of) == ("embed", None)
    assert len(notes) == 1


def test_rules_say_which_entry_feeds_which_name() -> None:
    rules = RuleSet(Place("wte", "embed"), Place("output", "head"))
    target, _, asked = _settled({"wte": 1, "output": 2}, rules)
    assert target["head"].alias_of is None
    assert asked == [("output", "wte")]


def test_one_entry_that_feeds_both_is_not_compared_with_itself() -> None:
    rules = RuleSet(Split("wte", (Part("embed"), Part("head"))))
    assert _settled({"wte": 1}, rules)[2] == []


def test_slots_are_compared_one_by_one() -> None:
    rules = RuleSet(*(Place(f"{n}.{s}", n, slot=s) for n in ("embed", "head") for s in "qk"))
    target, _, asked = _settled({"embed.q": 1, "embed.k": 2, "head.q": 1, "head.k": 3}, rules)
    assert asked == [("head.q", "embed.q"), ("head.k", "embed.k")]
    assert target["head"].alias_of is None
