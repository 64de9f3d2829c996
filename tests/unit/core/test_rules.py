"""Rules: the notation, what each kind does, what is refused."""

from __future__ import annotations

import pytest

from tensorferry.core.boxes import Region
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.rules import Drop, Ignore, Join, Part, Place, Rule, Split, compiled
from tensorferry.core.ruleset import COMMON_LEFTOVERS, Destination, Route, RuleSet
from tensorferry.core.transforms import Add, Concat, Custom, Stack, Take, TensorSpec, Transform, Transpose
from tensorferry.errors import RuleError


def sent(rules: RuleSet, name: str) -> tuple[Destination, ...]:
    route = rules.route(name)
    assert route is not None
    return route.to


@pytest.mark.parametrize(
    ("source", "name", "matches"),
    [
        ("layers.{i}.w", "layers.12.w", True),
        ("layers.{i}.w", "layers.x.w", False),
        ("layers.{i}.w", "model.layers.1.w", False),
        ("layers.{i}.w", "layers.1.w.b", False),
        ("layers.{i}.w", "layers.1xw", False),
        ("{x:part}.w", "lin.w", True),
        ("{x:part}.w", "a.lin.w", False),
        ("{x:path}.w", "a.lin.w", True),
        ("{x:path}.w", "w", False),
        ("a.w1", "a.w1", True),
        ("a+b.{i}", "aab.1", False),
    ],
)
def test_a_source_matches_whole_names(source: str, name: str, matches: bool) -> None:
    assert (compiled(source).fullmatch(name) is not None) is matches


@pytest.mark.parametrize("source", ["a.{", "a.{I}", "a.{i:word}", "{i}.{i}", "a}"])
def test_a_malformed_source_is_refused(source: str) -> None:
    with pytest.raises(RuleError):
        RuleSet(Drop(source, "no"))


def test_a_placeholder_that_the_source_lacks_is_refused() -> None:
    with pytest.raises(RuleError, match="placeholder 'j'"):
        RuleSet(Place("a.{i}", "b.{j}"))


def test_a_place_renames_and_names_a_slot() -> None:
    rules = RuleSet(Place("{p:path}.experts.{e}.w1.weight", "{p}.experts.w13", "{e}.gate"))
    assert sent(rules, "l.0.experts.7.w1.weight") == (Destination("l.0.experts.w13", "7.gate", None),)


def test_a_split_sends_one_entry_to_several_places() -> None:
    halves: list[Transform] = [Take(Region.whole((2,)), (2,)), Add(1.0)]
    rules = RuleSet(Split("c_attn.{i}", (Part("q.{i}", via=halves[0]), Part("k.{i}", "s", halves[1]))))
    assert sent(rules, "c_attn.3") == (Destination("q.3", "", halves[0]), Destination("k.3", "s", halves[1]))


def test_the_inputs_of_a_join_are_ordered_by_source_and_open_numbers() -> None:
    rules = RuleSet(Join(("l.{i}.e.{j}.gate", "l.{i}.e.{j}.up"), "l.{i}.w13", Concat(0)))
    assert sent(rules, "l.2.e.5.up") == (Destination("l.2.w13", "", Concat(0), (1, 5), 2),)


@pytest.mark.parametrize(
    "sources",
    [(), ("a.{x:part}",), ("a.{i}", "b"), ("a.{i}", "b.{j}")],
    ids=["none", "no number", "one without", "different ones"],
)
def test_a_join_whose_inputs_have_no_order_is_refused(sources: tuple[str, ...]) -> None:
    with pytest.raises(RuleError, match=r"join into 'w'"):
        RuleSet(Join(sources, "w", Stack()))


def test_the_first_rule_that_matches_decides() -> None:
    rules = RuleSet(Drop("a.{i}", "one"), Place("a.1", "b"), Ignore("{x:path}", "two"))
    assert rules.route("a.1") == Route(dropped="one")
    assert rules.route("c") == Route(ignorable="two")


def test_a_name_that_no_rule_matches_has_no_route() -> None:
    assert RuleSet(Place("a", "b")).route("c") is None


def test_rule_sets_follow_each_other() -> None:
    assert (RuleSet(Drop("a", "x")) | RuleSet(Drop("b", "y"))).rules == (Drop("a", "x"), Drop("b", "y"))


def test_rules_under_a_prefix_have_it_on_both_sides() -> None:
    rules = RuleSet(
        Place("a", "b"), Split("c", (Part("d"),)), Join(("e", "f"), "g", Concat()), Drop("h", "no"), Ignore("i", "no")
    ).under("x.")
    assert rules.rules == (
        Place("x.a", "x.b"),
        Split("x.c", (Part("x.d"),)),
        Join(("x.e", "x.f"), "x.g", Concat()),
        Drop("x.h", "no"),
        Ignore("x.i", "no"),
    )


def test_a_place_leads_back_with_the_inverse_transform() -> None:
    rules = RuleSet(Place("h.{i}.{x:path}.w", "l.{i}.{x}.weight", via=Transpose((2, 0, 1))), Drop("y", "no"))
    assert rules.inverse() == RuleSet(Place("l.{i}.{x:path}.weight", "h.{i}.{x}.w", via=Transpose((1, 2, 0))))


@pytest.mark.parametrize(
    "rule",
    [
        Join(("a", "b"), "c", Concat()),
        Split("a", (Part("b"),)),
        Place("a.{i}", "b"),
        Place("a", "b", "slot"),
        Place("a", "b", via=Custom("f", TensorSpec(DTYPES["F32"], (1,)))),
    ],
    ids=["join", "split", "lost number", "slot", "custom"],
)
def test_what_cannot_be_undone_has_no_inverse(rule: Rule) -> None:
    with pytest.raises(RuleError):
        RuleSet(rule).inverse()


def test_explaining_folds_layers_and_says_what_happens() -> None:
    rules = RuleSet(Place("h.{i}.w", "l.{i}.weight", "q", Add(1.0)), Drop("mtp.{x:path}", "draft"))
    names = [*(f"h.{i}.w" for i in range(4)), "mtp.0.w", "norm"]
    assert rules.explain(names) == [
        "h.{0..3}.w -> l.*.weight[q] via add",
        "mtp.0.w -> dropped: draft",
        "norm -> norm (no rule)",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.rotary_emb.inv_freq",
        "transformer.h.1.attn.masked_bias",
        "rope.freqs",
        "bert.embeddings.position_ids",
        "bn.num_batches_tracked",
    ],
)
def test_what_models_compute_themselves_is_a_common_leftover(name: str) -> None:
    route = COMMON_LEFTOVERS.route(name)
    assert route is not None
    assert route.ignorable


def test_a_literal_layer_number_means_that_layer_only() -> None:
    rules = RuleSet(Drop("model.layers.2.{x:path}", "draft"), Place("model.layers.{i}.{x:path}", "l.{i}.{x}"))
    assert rules.route("model.layers.2.w") == Route(dropped="draft")
    assert sent(rules, "model.layers.20.w")[0].into == "l.20.w"
    assert sent(rules, "model.layers.0.w")[0].into == "l.0.w"


def test_numbers_too_long_for_a_layer_match_no_number() -> None:
    assert RuleSet(Place("h.{i}.w", "l.{i}")).route("h." + "9" * 5000 + ".w") is None
