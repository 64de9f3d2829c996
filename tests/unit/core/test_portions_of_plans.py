"""How plans are cut into portions: whole small tensors together, large ones in runs of their rows."""

from __future__ import annotations

from helpers.core_values import catalogue_of, columns, slot, target_of
from tensorferry.core.boxes import Box, Region, Shape
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.plan import Plan
from tensorferry.core.planning import make_plan
from tensorferry.core.portions import portions
from tensorferry.core.rules import Place
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.target import TargetTensor
from tensorferry.core.transforms import Permute, TensorSpec, Transform, Transpose

FED = RuleSet(*(Place(name, "p", name) for name in "abc"))


def cut(shapes: dict[str, Shape], most: int, order: str = "") -> list[dict[str, Shape]]:
    plan = make_plan(catalogue_of(shapes), target_of(shapes))
    parts = portions(plan, order.split() or list(shapes), most)
    return [{name: spec.shape for name, spec in part.parameters.items()} for part in parts]


def via(transform: Transform, entry: Shape, made: Shape, most: int) -> list[list[Shape]]:
    """Return for each portion the shapes of what it takes from the entry ``e``."""
    rules = RuleSet(Place("e", "p", via=transform))
    plan = make_plan(catalogue_of({"e": entry}), target_of({"p": made}), rules)
    assert not plan.problems
    return [[s.sources[0].region.shape for s in part.steps] for part in portions(plan, ["p"], most)]


def test_small_tensors_are_made_together_in_the_order_that_was_asked_for() -> None:
    shapes: dict[str, Shape] = {"a": (2,), "b": (2,), "c": (), "d": (0, 3)}
    assert cut(shapes, 16) == [{"a": (2,), "b": (2,)}, {"c": (), "d": (0, 3)}]
    assert cut(shapes, 1000, "c a") == [{"c": (), "a": (2,)}]


def test_a_large_tensor_is_cut_into_runs_of_rows_and_its_end_goes_with_what_follows() -> None:
    assert cut({"a": (5, 2), "b": (1,)}, 16) == [{"a": (2, 2)}, {"a": (2, 2)}, {"a": (1, 2), "b": (1,)}]


def test_rows_that_are_too_large_are_cut_themselves() -> None:
    assert cut({"a": (2, 3)}, 8) == [{"a": (1, 2)}, {"a": (1, 1)}, {"a": (1, 2)}, {"a": (1, 1)}]


def test_a_run_of_a_turned_tensor_takes_columns_of_the_entry() -> None:
    assert via(Transpose((1, 0)), (4, 6), (6, 4), 2 * 4 * 4) == [[(4, 2)], [(4, 2)], [(4, 2)]]


def test_a_run_of_permuted_rows_takes_the_heads_that_it_is_made_of() -> None:
    assert via(Permute((2, 2, 2, 3), (0, 2, 1, 3)), (8, 3), (8, 3), 4 * 3 * 4) == [[(4, 3)], [(4, 3)]]


def test_packed_numbers_are_cut_at_their_blocks() -> None:
    plan = make_plan(catalogue_of({"e": (1, 96)}, dtype="Q8_0"), target_of({"e": (1, 96)}))
    assert [p.parameters["e"].shape for p in portions(plan, ["e"], 50 * 4)] == [(1, 32)] * 3


def test_slots_that_lie_side_by_side_are_cut_alike() -> None:
    slots = {"k": slot(columns((6, 4), 0, 3), (6, 3)), "v": slot(columns((6, 4), 3, 4), (6, 1))}
    target = {"p": TargetTensor("p", DTYPES["F32"], (6, 4), slots)}
    rules = RuleSet(Place("k", "p", "k"), Place("v", "p", "v"))
    plan = make_plan(catalogue_of({"k": (6, 3), "v": (6, 1)}), target, rules)
    parts = list(portions(plan, ["p"], 3 * 4 * 4))
    assert [[s.sources[0].region.shape for s in part.steps] for part in parts] == [[(3, 3), (3, 1)]] * 2


def test_what_needs_all_of_its_entry_for_every_part_is_made_whole() -> None:
    assert via(Permute((2, 4, 3), (1, 0, 2)), (8, 3), (8, 3), 24) == [[(8, 3)]]


def test_what_is_seen_in_ways_without_a_common_cut_is_made_whole() -> None:
    halves = {name: slot(Region((2, 3), Box((n, 0), (n + 1, 3))), (3,)) for n, name in enumerate("ab")}
    odd = slot(Region((3, 2), Box((0, 0), (3, 1))), (3,))
    target = {"p": TargetTensor("p", DTYPES["F32"], (6,), {**halves, "c": odd})}
    steps = make_plan(catalogue_of({"a": (3,), "b": (3,), "c": (3,)}), target, FED).steps
    parts = list(portions(Plan(steps, {"p": TensorSpec(DTYPES["F32"], (6,))}), ["p"], 4))
    assert [len(part.steps) for part in parts] == [3]
