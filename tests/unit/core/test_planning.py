"""Making a plan: where entries go, and every sort of problem that can be found on the way."""

from __future__ import annotations

import pytest

from helpers.core_values import by_name, catalogue_of, columns, entry, rows, slot, target_of
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.catalogue import Catalogue, Chunk, TensorEntry
from tensorferry.core.dtypes import DTYPES, DType, Kind
from tensorferry.core.plan import Dropped, Plan, Strictness
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Drop, Ignore, Join, Part, Place, Rule, Split
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import Add, Concat, Dequantize, Stack, Take, Transpose
from tensorferry.errors import PlanError
from tensorferry.problems import Problem, ProblemKind

F32 = DTYPES["F32"]


def plan_of(have: dict[str, Shape], want: dict[str, Shape], *rules: Rule, strict: Strictness | None = None) -> Plan:
    return make_plan(catalogue_of(have), target_of(want), RuleSet(*rules), strict=strict)


def only(plan: Plan) -> Problem:
    (problem,) = plan.problems
    return problem


# -- where entries go


def test_an_entry_goes_to_the_parameter_of_its_name() -> None:
    (step,) = plan_of({"w": (2, 3)}, {"w": (2, 3)}).steps
    assert (step.parameter, step.into, step.sources[0].region) == ("w", Region.whole((2, 3)), Region.whole((2, 3)))


def test_a_rule_renames() -> None:
    (step,) = plan_of({"h.0.w": (2,)}, {"l.0.w": (2,)}, Place("h.{i}.w", "l.{i}.w")).steps
    assert (step.sources[0].entry.name, step.parameter) == ("h.0.w", "l.0.w")


def test_a_dropped_entry_is_not_used_even_if_a_parameter_has_its_name() -> None:
    plan = plan_of({"w": (2,)}, {"w": (2,)}, Drop("w", "replaced"))
    assert plan.dropped == (Dropped("w", "replaced"),)
    assert plan.missing == ("w",)


def test_an_ignorable_entry_fills_the_parameter_of_its_name_where_there_is_one() -> None:
    assert len(plan_of({"w": (2,)}, {"w": (2,)}, Ignore("{x:path}", "computed")).steps) == 1


def test_an_ignorable_entry_that_nothing_wants_is_dropped_with_its_reason() -> None:
    assert plan_of({"w": (2,)}, {}, Ignore("{x:path}", "computed")).dropped == (Dropped("w", "computed"),)


def test_the_entry_of_another_rank_is_dropped() -> None:
    experts = TargetTensor("experts", F32, (1, 2), {"0": slot(Region.whole((1, 2)), (2,))}, absent=frozenset({"1"}))
    plan = make_plan(
        catalogue_of({"e.0": (2,), "e.1": (2,)}), by_name([experts]), RuleSet(Place("e.{i}", "experts", "{i}"))
    )
    assert plan.dropped == (Dropped("e.1", "not on this rank"),)
    assert plan.problems == ()


def test_a_window_of_the_entry_is_read() -> None:
    half = TargetTensor("w", F32, (4, 8), {"": slot(Region.whole((4, 8)), (4, 16), columns((4, 16), 8, 16))})
    plan = make_plan(catalogue_of({"w": (4, 16)}), by_name([half]))
    assert plan.steps[0].sources[0].region == columns((4, 16), 8, 16)
    assert plan.bytes_needed == 4 * 8 * 4


def test_a_split_entry_feeds_several_parameters() -> None:
    rules = Split("qk", tuple(Part(n, via=Take(rows((4, 2), 2 * i, 2 * i + 2), (2, 2))) for i, n in enumerate("qk")))
    plan = plan_of({"qk": (4, 2)}, {"q": (2, 2), "k": (2, 2)}, rules)
    assert [s.sources[0].region for s in plan.steps] == [rows((4, 2), 0, 2), rows((4, 2), 2, 4)]
    assert all(s.via is None for s in plan.steps)


def test_stacked_experts_are_put_in_place_one_by_one() -> None:
    plan = plan_of({"e.1": (2, 3), "e.0": (2, 3)}, {"w": (2, 2, 3)}, Join(("e.{i}",), "w", Stack()))
    assert [(s.sources[0].entry.name, s.into.box, s.via) for s in plan.steps] == [
        ("e.0", Box((0, 0, 0), (1, 2, 3)), None),
        ("e.1", Box((1, 0, 0), (2, 2, 3)), None),
    ]


def test_only_the_experts_in_the_window_are_read() -> None:
    mine = TargetTensor("w", F32, (1, 2, 3), {"": slot(Region.whole((1, 2, 3)), (2, 2, 3), rows((2, 2, 3), 1, 2))})
    rules = RuleSet(Join(("e.{i}",), "w", Stack()))
    plan = make_plan(catalogue_of({"e.0": (2, 3), "e.1": (2, 3)}), by_name([mine]), rules)
    assert [s.sources[0].entry.name for s in plan.steps] == ["e.1"]


def test_gate_and_up_are_joined_by_halves_of_a_rank() -> None:
    """Rank 1 of 2 of a parameter that joins gate (4 columns) and up (4 columns) side by side takes rows 2 to 4."""
    mine = TargetTensor("w", F32, (2, 8), {"": slot(Region.whole((2, 8)), (4, 8), rows((4, 8), 2, 4))})
    rules = RuleSet(Join(("gate", "up"), "w", Concat(1)))
    plan = make_plan(catalogue_of({"gate": (4, 4), "up": (4, 4)}), by_name([mine]), rules)
    assert [(s.into, s.sources[0].region) for s in plan.steps] == [
        (columns((2, 8), 0, 4), rows((4, 4), 2, 4)),
        (columns((2, 8), 4, 8), rows((4, 4), 2, 4)),
    ]


def test_a_transform_reads_only_what_its_window_needs() -> None:
    mine = TargetTensor("w", F32, (2, 4), {"": slot(Region.whole((2, 4)), (3, 4), rows((3, 4), 1, 3))})
    rules = RuleSet(Place("w", "w", via=Transpose((1, 0))))
    (step,) = make_plan(catalogue_of({"w": (4, 3)}), by_name([mine]), rules).steps
    assert step.sources[0].region == columns((4, 3), 1, 3)
    assert step.window == rows((3, 4), 1, 3)


def test_padding_is_filled_with_the_declared_default() -> None:
    padded = TargetTensor("w", F32, (5, 2), {"": slot(rows((5, 2), 0, 3), (3, 2))}, default=0.0)
    plan = make_plan(catalogue_of({"w": (3, 2)}), by_name([padded]))
    assert [(s.into, s.fill) for s in plan.steps[1:]] == [(Region((10,), Box((6,), (10,))), 0.0)]


def test_another_shape_of_the_same_elements_is_taken_where_the_slot_says_so() -> None:
    scale = TargetTensor("s", F32, (), {"": Slot.whole((), also=((1,),))})
    assert make_plan(catalogue_of({"s": (1,)}), by_name([scale])).problems == ()
    assert make_plan(catalogue_of({"s": (2,)}), by_name([scale])).problems != ()


# -- ties


def tied(*more: TargetTensor) -> dict[str, TargetTensor]:
    head = TargetTensor("head", F32, (2, 3), alias_of="embed")
    return {t.name: t for t in (TargetTensor.plain("embed", F32, (2, 3)), head, *more)}


def test_a_tied_tensor_saved_twice_is_used_once() -> None:
    plan = make_plan(catalogue_of({"head": (2, 3), "embed": (2, 3)}), tied())
    assert [s.sources[0].entry.name for s in plan.steps] == ["embed"]
    assert plan.dropped == (Dropped("head", "tied to embed"),)
    assert plan.aliases == {"head": "embed"}


def test_a_tied_tensor_saved_under_its_other_name_fills_the_parameter() -> None:
    (step,) = make_plan(catalogue_of({"head": (2, 3)}), tied()).steps
    assert (step.parameter, step.sources[0].entry.name) == ("embed", "head")


def test_a_tied_tensor_keeps_the_transform_of_its_rule() -> None:
    rules = RuleSet(Place("lm_head", "head", via=Transpose((1, 0))))
    (step,) = make_plan(catalogue_of({"lm_head": (3, 2)}), tied(), rules).steps
    assert (step.parameter, step.via) == ("embed", Transpose((1, 0)))


def test_ties_of_ties_share_the_first_parameter() -> None:
    third = TargetTensor("third", F32, (2, 3), alias_of="head")
    plan = make_plan(catalogue_of({"third": (2, 3)}), tied(third))
    assert plan.aliases == {"head": "embed", "third": "embed"}
    assert plan.problems == ()


@pytest.mark.parametrize("owner", ["nowhere", "a"])
def test_a_tie_to_nothing_is_refused(owner: str) -> None:
    with pytest.raises(PlanError, match=f"a is tied to {owner}, which is no parameter to be filled"):
        make_plan(catalogue_of({}), by_name([TargetTensor("a", F32, (2,), alias_of=owner)]))


# -- problems


def test_a_parameter_that_nothing_fills_is_missing() -> None:
    problem = only(plan_of({}, {"w": (2,)}))
    assert (problem.kind, problem.subject, problem.fatal) == (ProblemKind.MISSING, "w", True)


def test_an_entry_that_nothing_wants_is_unexpected_and_harmless() -> None:
    problem = only(plan_of({"x": (2,)}, {}))
    assert (problem.kind, problem.subject, problem.fatal) == (ProblemKind.UNEXPECTED, "x", False)


def test_an_entry_sent_to_a_parameter_that_is_not_there_says_so() -> None:
    assert "a rule sends it to y" in only(plan_of({"x": (2,)}, {}, Place("x", "y"))).detail


def test_an_entry_sent_to_a_slot_that_is_not_there_says_which_there_are() -> None:
    fused = TargetTensor("qk", F32, (4,), {n: slot(rows((4,), 2 * i, 2 * i + 2), (2,)) for i, n in enumerate("qk")})
    rules = RuleSet(Place("{s:part}_proj", "qk", "{s}"))
    plan = make_plan(catalogue_of({"q_proj": (2,), "k_proj": (2,), "v_proj": (2,)}), by_name([fused]), rules)
    assert only(plan).detail == "a rule sends it to slot 'v' of qk, which has only 'q', 'k'"
    assert only(plan).fatal


def test_another_shape_is_a_problem_with_both_shapes() -> None:
    problem = only(plan_of({"w": (2, 3)}, {"w": (3, 2)}))
    assert (problem.kind, problem.fatal) == (ProblemKind.SHAPE, True)
    assert problem.detail == "the checkpoint has (2, 3), the model expects (3, 2)"


def test_inputs_that_a_transform_cannot_take_are_a_problem_of_shape() -> None:
    plan = plan_of({"e.0": (2,), "e.1": (3,)}, {"w": (2, 2)}, Join(("e.{i}",), "w", Stack()))
    assert only(plan).kind is ProblemKind.SHAPE
    assert "stack takes tensors of one shape" in only(plan).detail


def test_integers_for_floats_are_a_lossy_dtype() -> None:
    plan = make_plan(catalogue_of({"w": (2,)}, dtype="I32"), target_of({"w": (2,)}))
    assert only(plan).kind is ProblemKind.LOSSY_DTYPE
    assert only(plan).detail.startswith("I32 in the checkpoint, F32 in the model")


def test_a_cast_between_floats_is_no_problem_and_is_counted() -> None:
    plan = make_plan(catalogue_of({"w": (2,)}, dtype="BF16"), target_of({"w": (2,)}))
    assert plan.problems == ()
    assert plan.casts == {(DTYPES["BF16"], F32): 1}


def test_a_gap_between_slots_is_a_problem() -> None:
    gappy = TargetTensor("w", F32, (4,), {"": slot(rows((4,), 0, 3), (3,))})
    assert only(make_plan(catalogue_of({"w": (3,)}), by_name([gappy]))).kind is ProblemKind.GAP


def test_overlapping_slots_are_a_problem() -> None:
    slots = {"a": slot(rows((4,), 0, 3), (3,)), "b": slot(rows((4,), 2, 4), (2,))}
    rules = RuleSet(Place("{s:part}", "w", "{s}"))
    plan = make_plan(catalogue_of({"a": (3,), "b": (2,)}), by_name([TargetTensor("w", F32, (4,), slots)]), rules)
    assert only(plan).kind is ProblemKind.OVERLAP


@pytest.mark.parametrize(
    "rules",
    [
        (Place("a", "w"), Place("b", "w")),
        (Place("a", "w"), Join(("b",), "w", Stack())),
        (Join(("a",), "w", Concat()), Join(("b",), "w", Concat())),
        (Split("a", (Part("w"), Part("w"))), Drop("b", "no")),
    ],
    ids=["two places", "place and join", "two joins", "one entry twice"],
)
def test_two_entries_for_one_slot_are_ambiguous(rules: tuple[Rule, ...]) -> None:
    problem = only(plan_of({"a": (2,), "b": (2,)}, {"w": (2,)}, *rules))
    assert (problem.kind, problem.subject) == (ProblemKind.AMBIGUOUS_RULE, "w")
    assert "both go to w; change the rules" in problem.detail


def test_an_absent_input_of_a_join_is_named() -> None:
    plan = plan_of({"e.0": (2,), "e.2": (2,)}, {"w": (3, 2)}, Join(("e.{i}",), "w", Stack()))
    assert only(plan).detail == "of the tensors that are joined into it, input 1 of its source 0 is absent"


def test_an_absent_half_of_a_join_is_named() -> None:
    plan = plan_of({"e.0.up": (2,)}, {"w": (4,)}, Join(("e.{i}.gate", "e.{i}.up"), "w", Concat()))
    assert only(plan).detail == "of the tensors that are joined into it, input 0 of its source 0 is absent"


def test_an_input_with_a_huge_number_is_found_out_at_once() -> None:
    plan = plan_of({"e.0": (2,), "e.999999999999": (2,)}, {"w": (2, 2)}, Join(("e.{i}",), "w", Stack()))
    assert "input 1 of its source 0 is absent" in only(plan).detail


def test_a_cut_through_packed_elements_is_a_problem() -> None:
    odd = TargetTensor("w", DTYPES["F4"], (2, 3), {"": slot(Region.whole((2, 3)), (2, 6), columns((2, 6), 0, 3))})
    problem = only(make_plan(Catalogue([entry("w", (2, 6), dtype="F4")], format="raw"), by_name([odd])))
    assert problem.kind is ProblemKind.SHAPE
    assert "whole blocks of 2 F4 elements" in problem.detail


def test_empty_slots_are_one_finding() -> None:
    fused = TargetTensor("w", F32, (12,), {str(i): slot(rows((12,), 2 * i, 2 * i + 2), (2,)) for i in range(6)})
    plan = make_plan(catalogue_of({"e.5": (2,)}), by_name([fused]), RuleSet(Place("e.{i}", "w", "{i}")))
    assert only(plan).detail == "nothing in the checkpoint feeds its slots '0', '1', '2', '3' and 1 more"
    assert only(make_plan(catalogue_of({}), by_name([fused]))).detail == ""


def test_all_problems_are_found_at_once() -> None:
    have = catalogue_of({"a": (2,), "b": (2,), "long": (3,), "extra": (1,), "s1": (2,), "s2": (2,)})
    odd = TensorEntry("odd", DType("type 200", Kind.UNKNOWN, 0), (2,), (Chunk(None, None),))
    have = have.replacing([*have.values(), entry("ints", (2,), dtype="I64"), odd])
    want = target_of({"missing": (2,), "long": (2,), "two": (2,), "ints": (2,), "odd": (2,)})
    want["gap"] = TargetTensor("gap", F32, (4,), {"": slot(rows((4,), 0, 2), (2,))})
    want["over"] = TargetTensor("over", F32, (3,), {n: slot(rows((3,), i, i + 2), (2,)) for i, n in enumerate("12")})
    rules = RuleSet(
        Place("a", "two"), Place("b", "two"), Place("s{i}", "over", "{i}"), Join(("gap.{i}",), "gap", Stack())
    )
    found = {p.kind for p in make_plan(have, want, rules).problems}
    assert found == set(ProblemKind) - {ProblemKind.UNUSED_RULE}


# -- strictness


def test_unexpected_entries_stop_a_strict_load() -> None:
    assert only(plan_of({"x": (2,)}, {}, strict=Strictness.strict())).fatal


def test_missing_parameters_can_be_let_through_and_are_still_reported() -> None:
    plan = plan_of({}, {"w": (2,)}, strict=Strictness(missing="warn"))
    assert plan.missing == ("w",)
    plan.raise_for_problems()


def test_some_parameters_may_be_missing() -> None:
    plan = plan_of({}, {"l.0.bias": (2,), "l.0.w": (2,)}, strict=Strictness(may_miss=("l.{i}.bias",)))
    assert [(p.subject, p.fatal) for p in plan.problems] == [("l.0.bias", False), ("l.0.w", True)]


def test_nothing_lets_an_unknown_type_through_and_it_is_named() -> None:
    odd = TensorEntry("w", DType("type 200", Kind.UNKNOWN, 0), (2,), (Chunk(None, None),))
    plan = make_plan(catalogue_of({}).replacing([odd]), target_of({"w": (2,)}), strict=Strictness(lossy="warn"))
    assert (only(plan).kind, only(plan).fatal) == (ProblemKind.UNSUPPORTED_DTYPE, True)
    with pytest.raises(PlanError, match=r"w.*type 200"):
        plan.raise_for_problems()


def test_lossy_casts_can_be_let_through() -> None:
    ints = catalogue_of({"w": (2,)}, dtype="I32")
    plan = make_plan(ints, target_of({"w": (2,)}), strict=Strictness(lossy="warn"))
    assert not only(plan).fatal


@pytest.mark.parametrize("kind", ["shape", "gap"])
def test_nothing_lets_wrong_shapes_and_gaps_through(kind: str) -> None:
    lax = Strictness(unexpected="warn", missing="warn", lossy="warn", may_miss=("{x:path}",))
    gappy = TargetTensor("w", F32, (4,), {"": slot(rows((4,), 0, 3), (3,))})
    have, want = ({"w": (2,)}, target_of({"w": (3,)})) if kind == "shape" else ({"w": (3,)}, by_name([gappy]))
    with pytest.raises(PlanError):
        make_plan(catalogue_of(have), want, strict=lax).raise_for_problems()


def test_a_transform_of_floats_may_not_turn_them_into_integers() -> None:
    plan = make_plan(
        catalogue_of({"w": (2,)}), target_of({"w": (2,)}, dtype="I8"), RuleSet(Place("w", "w", via=Add(1.0)))
    )
    assert only(plan).kind is ProblemKind.LOSSY_DTYPE


def test_a_part_of_packed_rows_is_dequantized_by_itself() -> None:
    taken = Take(Region((4, 2, 32), Box((3, 0, 0), (4, 2, 32))), (2, 32))
    catalogue = catalogue_of({"experts": (4, 2, 32)}, dtype="Q8_0")
    plan = make_plan(catalogue, target_of({"w": (2, 32)}), RuleSet(Place("experts", "w", via=taken)))
    (step,) = plan.steps
    assert (step.via, step.sources[0].region) == (Dequantize(), Region((4, 2, 32), taken.region.box))
    assert plan.bytes_needed == 2 * 34
