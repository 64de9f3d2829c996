"""Rules that lead nowhere, or that nothing matches, are told of where their author looks."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.core_values import by_name, catalogue_of, rows, slot
from tensorferry.core.boxes import Shape
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.plan import Plan, Strictness, describe_problems
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Drop, Ignore, Join, Part, Place, Rule, Split
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import TargetTensor
from tensorferry.core.transforms import Stack
from tensorferry.core.unused import unused_patterns, unused_rules
from tensorferry.errors import ConfigError, RuleError
from tensorferry.problems import ProblemKind

F32 = DTYPES["F32"]
LAYERS = 3


def fused(name: str) -> TargetTensor:
    return TargetTensor(name, F32, (6,), {n: slot(rows((6,), 2 * i, 2 * i + 2), (2,)) for i, n in enumerate("qkv")})


def layered(*rules: Rule, strict: Strictness | None = None) -> Plan:
    """Plan three layers of q, k and v into one parameter each."""
    have: dict[str, Shape] = {f"h.{i}.{n}": (2,) for i in range(LAYERS) for n in "qkv"}
    return make_plan(
        catalogue_of(have), by_name([fused(f"l.{i}.qkv") for i in range(LAYERS)]), RuleSet(*rules), strict=strict
    )


def told(plan: Plan) -> list[str]:
    return describe_problems(plan.fatal).splitlines()[1:]


def test_a_misspelt_slot_is_told_with_the_parameter_and_with_the_entry() -> None:
    plan = layered(
        Place("h.{i}.q", "l.{i}.qkv", "Q"), Place("h.{i}.k", "l.{i}.qkv", "k"), Place("h.{i}.v", "l.{i}.qkv", "v")
    )
    assert told(plan) == [
        "  unexpected: h.{0..2}.q: a rule sends it to slot 'Q' of l.{0..2}.qkv, which has only 'q', 'k', 'v'",
        "  missing: l.{0..2}.qkv: nothing in the checkpoint feeds its slot 'q'; "
        "a rule sends h.{0..2}.q to its slot 'Q', and it has only 'q', 'k', 'v'",
    ]


def test_a_misspelt_slot_stops_the_load_even_where_the_parameter_may_be_missing() -> None:
    rules = (
        Place("h.{i}.q", "l.{i}.qkv", "Q"), Place("h.{i}.k", "l.{i}.qkv", "k"), Place("h.{i}.v", "l.{i}.qkv", "v")
    )  # fmt: skip
    plan = layered(*rules, strict=Strictness(missing="warn"))
    assert {p.kind for p in plan.fatal} == {ProblemKind.UNEXPECTED}


def test_several_misspelt_slots_are_one_clause() -> None:
    plan = layered(*(Place(f"h.{{i}}.{n}", "l.{i}.qkv", n.upper()) for n in "qkv"))
    missing = next(line for line in told(plan) if "missing" in line)
    assert missing == (
        "  missing: l.{0..2}.qkv: rules send h.{0..2}.q to its slot 'Q', h.{0..2}.k to its slot 'K', "
        "h.{0..2}.v to its slot 'V', and it has only 'q', 'k', 'v'"
    )


def test_a_rule_without_a_slot_onto_a_parameter_with_slots_says_which_there_are() -> None:
    plan = make_plan(catalogue_of({"q": (2,)}), by_name([fused("qkv")]), RuleSet(Place("q", "qkv")))
    assert told(plan) == [
        "  unexpected: q: a rule sends it to qkv without a slot, which has only 'q', 'k', 'v'",
        "  missing: qkv: a rule sends q to it without a slot, and it has only 'q', 'k', 'v'",
    ]


def test_a_slot_of_a_parameter_without_slots_says_that_it_takes_whole_entries() -> None:
    plan = make_plan(
        catalogue_of({"x": (2,)}), by_name([TargetTensor.plain("w", F32, (2,))]), RuleSet(Place("x", "w", "q"))
    )
    assert told(plan)[1] == (
        "  missing: w: a rule sends x to its slot 'q', and it has no slots: send whole entries to it without a slot"
    )


def test_an_entry_of_the_name_of_a_parameter_with_slots_is_told_what_it_lacks() -> None:
    plan = make_plan(catalogue_of({"qkv": (6,)}), by_name([fused("qkv")]))
    (unexpected,) = (p for p in plan.problems if p.kind is ProblemKind.UNEXPECTED)
    assert unexpected.detail == (
        "the parameter of this name is filled in parts, its slots 'q', 'k', 'v'; no rule says which"
    )
    assert not unexpected.fatal


def test_a_misspelt_parameter_is_told_with_the_one_that_is_missing() -> None:
    have: dict[str, Shape] = {f"h.{i}.up.weight": (2,) for i in range(LAYERS)}
    want = by_name([TargetTensor.plain(f"l.{i}.mlp.up.weight", F32, (2,)) for i in range(LAYERS)])
    plan = make_plan(catalogue_of(have), want, RuleSet(Place("h.{i}.up.weight", "l.{i}.mpl.up.weight")))
    assert told(plan) == [
        "  missing: l.{0..2}.mlp.up.weight: "
        "a rule sends h.{0..2}.up.weight to l.{0..2}.mpl.up.weight, which the model does not have"
    ]


def test_a_parameter_that_is_misspelt_beyond_recognition_is_told_beside_what_is_missing() -> None:
    plan = make_plan(
        catalogue_of({"x": (2,)}), by_name([TargetTensor.plain("weight", F32, (2,))]), RuleSet(Place("x", "kernel"))
    )
    assert told(plan) == [
        "  missing: weight",
        "  unexpected: x: a rule sends it to kernel, which the model does not have",
    ]


def test_a_rule_for_a_parameter_that_this_model_lacks_stops_nothing_where_all_is_filled() -> None:
    have: dict[str, Shape] = {"w": (2,), "head": (2,)}
    plan = make_plan(
        catalogue_of(have), by_name([TargetTensor.plain("w", F32, (2,))]), RuleSet(Place("head", "lm_head"))
    )
    assert not plan.fatal
    assert plan.unexpected == ("head",)


def test_a_rule_onto_a_tied_parameter_is_held_to_the_slots_of_its_owner() -> None:
    tied = TargetTensor("tied", F32, (6,), alias_of="qkv")
    have: dict[str, Shape] = {"q": (2,), "k": (2,), "v": (2,)}
    rules = RuleSet(Place("q", "tied", "Q"), Place("k", "qkv", "k"), Place("v", "tied", "v"))
    plan = make_plan(catalogue_of(have), by_name([fused("qkv"), tied]), rules)
    assert any("a rule sends q to its slot 'Q'" in line for line in told(plan))


# -- what nothing matches


def test_a_source_that_matches_nothing_is_a_finding_that_stops_nothing() -> None:
    rules = RuleSet(Place("h.{i}.norm.wieght", "l.{i}.norm"), Place("h.{i}.up", "l.{i}.up"))
    (problem,) = unused_rules(rules, ["h.0.norm.weight", "h.0.up"])
    assert (problem.kind, problem.subject, problem.fatal) == (ProblemKind.UNUSED_RULE, "h.{i}.norm.wieght", False)
    assert problem.near == ("h.0.norm.weight",)


def test_a_source_is_unused_where_an_earlier_rule_decides_for_all_that_it_matches() -> None:
    rules = RuleSet(Place("{n:path}.w", "{n}"), Place("h.{i}.w", "l.{i}"))
    assert [p.subject for p in unused_rules(rules, ["h.0.w"])] == ["h.{i}.w"]


def test_a_drop_of_all_the_rest_is_not_unused_where_there_is_no_rest() -> None:
    assert unused_rules(RuleSet(Place("h.{i}.w", "l.{i}"), Drop("{rest:path}", "not here")), ["h.0.w"]) == []


@pytest.mark.parametrize("source", ["h.*.w", r"h\.(\d+)\.w", "h.0.w|h.1.w", "h.[0-9].w", "^h"])
def test_globs_and_regular_expressions_are_refused_with_what_to_write_instead(source: str) -> None:
    with pytest.raises(RuleError, match=r"write \{i\} for a number|they write \{i\}"):
        unused_rules(RuleSet(Place(source, "w")), ["h.0.w"])
    with pytest.raises(RuleError, match=r"\{x:path\}"):
        unused_patterns(Strictness(may_miss=(source,)), ["h.0.w"])


def test_a_name_that_really_holds_a_star_can_be_named() -> None:
    assert unused_rules(RuleSet(Place("h.*.w", "w")), ["h.*.w"]) == []


def test_a_pattern_of_may_miss_that_no_parameter_has_is_a_finding() -> None:
    (problem,) = unused_patterns(Strictness(may_miss=("l.{i}.bais", "norm")), ["l.0.bias", "norm"])
    assert (problem.subject, problem.detail) == ("l.{i}.bais", "of may_miss matches no parameter of the model")
    assert problem.near == ("l.0.bias",)


# -- what is no rule

place: Any = Place
join: Any = Join
split: Any = Split
drop: Any = Drop
ignore: Any = Ignore


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([[Place("a", "b")]], r"not list: give rules one by one, RuleSet\(\*rules\)"),
        ([("a", "b")], "not tuple"),
        ([{"a": "b"}], "not dict"),
        ([Place], "not type"),
        ([place(1, "b")], "text is expected, not 1"),
        ([place("a", None)], "text is expected, not None"),
        ([place("a", "b", 0)], "text is expected, not 0"),
        ([place("a", "b", via="transpose")], "via is a transform"),
        ([place("a", "b", via=Stack)], "via is a transform"),
        ([join("abc", "b", Stack())], "sources is a tuple of names, not 'abc'"),
        ([split("a", [Part("b")])], "parts is a tuple of Part"),
        ([drop("a", None)], "text is expected, not None"),
        ([ignore(None, "x")], "text is expected, not None"),
    ],
)
def test_what_is_no_rule_is_refused(rules: Any, words: str) -> None:
    with pytest.raises(RuleError, match=words):
        RuleSet(*rules)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"missing": "ignore"}, "missing 'ignore': one of error, warn is expected"),
        ({"unexpected": True}, "unexpected True: one of error, warn"),
        ({"lossy": None}, "lossy None"),
        ({"may_miss": "bias"}, r"may_miss 'bias': a tuple of names in rule notation is expected, such as \('bias',\)"),
        ({"may_miss": ["bias"]}, "a tuple of names"),
        ({"may_miss": (1,)}, "a tuple of names"),
    ],
)
def test_a_strictness_that_is_none_is_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Strictness(**options)


def test_a_name_that_is_no_rule_notation_is_refused_when_the_strictness_is_made() -> None:
    with pytest.raises(RuleError, match="brace"):
        Strictness(may_miss=("l.{I}.bias",))
