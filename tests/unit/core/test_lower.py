"""Schedules: reads and batches worked out by hand. That they move the right bytes is a property elsewhere."""

from __future__ import annotations

import pytest

from helpers.core_values import by_name, catalogue_of, columns, entry, rows, slot, target_of
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue, Chunk, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Join
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.schedule import Read
from tensorferry.core.target import Slot, TargetTensor
from tensorferry.core.transforms import Custom, Stack, TensorSpec
from tensorferry.errors import PlanError

BIG = 1 << 20
F32 = DTYPES["F32"]


def test_neighbours_in_a_file_become_one_read() -> None:
    shapes = {"a": (4,), "b": (8,), "c": (2,)}
    schedule = lower(
        make_plan(catalogue_of(shapes), target_of(shapes)), max_gap=0, max_read=BIG, max_staging=BIG, waste=1
    )
    assert [b.reads for b in schedule.batches] == [(Read("model.safetensors", 0, 56),)]
    assert schedule.bytes_read == schedule.plan.bytes_needed == 56


def test_an_entry_in_between_that_nobody_wants_is_not_read() -> None:
    plan = make_plan(catalogue_of({"a": (4,), "b": (8,), "c": (2,)}), target_of({"a": (4,), "c": (2,)}))
    schedule = lower(plan, max_gap=31, max_read=BIG, max_staging=BIG, waste=100)
    assert [(r.offset, r.length) for r in schedule.batches[0].reads] == [(0, 16), (48, 8)]


def test_a_small_hole_is_read_over() -> None:
    plan = make_plan(catalogue_of({"a": (4,), "b": (8,), "c": (2,)}), target_of({"a": (4,), "c": (2,)}))
    schedule = lower(plan, max_gap=32, max_read=BIG, max_staging=BIG, waste=100)
    assert [(r.offset, r.length) for r in schedule.batches[0].reads] == [(0, 56)]


def test_reads_follow_files_and_offsets_not_the_order_of_entries() -> None:
    entries = [entry("a", (1,), at=40), entry("b", (1,), file="2", at=0), entry("c", (1,), at=0)]
    plan = make_plan(Catalogue(entries, format="raw"), target_of({"a": (1,), "b": (1,), "c": (1,)}))
    schedule = lower(plan, max_gap=0, max_read=4, max_staging=4, waste=1)
    reads = [r for b in schedule.batches for r in b.reads]
    assert [(r.file, r.offset) for r in reads] == [("model.safetensors", 0), ("model.safetensors", 40), ("2", 0)]


def test_a_rank_of_columns_reads_only_its_columns() -> None:
    half = TargetTensor("w", F32, (4, 8), {"": slot(Region.whole((4, 8)), (4, 16), columns((4, 16), 8, 16))})
    schedule = lower(
        make_plan(catalogue_of({"w": (4, 16)}), by_name([half])), max_gap=0, max_read=BIG, max_staging=BIG, waste=1
    )
    assert schedule.batches[0].reads == (Read("model.safetensors", 32, 128, times=4, stride=64),)
    assert list(schedule.batches[0].reads[0].runs) == [(32, 32), (96, 32), (160, 32), (224, 32)]
    assert (schedule.reads, schedule.bytes_read) == (4, 128)


def test_filling_comes_first_and_reads_nothing() -> None:
    padded = TargetTensor("w", F32, (3, 2), {"": slot(rows((3, 2), 0, 2), (2, 2))}, default=0.0)
    schedule = lower(
        make_plan(catalogue_of({"w": (2, 2)}), by_name([padded])), max_gap=0, max_read=BIG, max_staging=BIG, waste=1
    )
    first, second = schedule.batches
    assert (first.reads, [t.step for t in first.tasks]) == ((), [1])
    assert len(second.reads) == 1


def test_an_empty_parameter_still_has_its_task() -> None:
    schedule = lower(
        make_plan(catalogue_of({"w": (0, 4)}), target_of({"w": (0, 4)})), max_gap=0, max_read=9, max_staging=9, waste=1
    )
    assert [(t.step, t.inputs) for b in schedule.batches for t in b.tasks] == [(0, ())]
    assert schedule.reads == 0


def test_holes_never_take_a_batch_past_the_staging_bound() -> None:
    shapes: dict[str, tuple[int, ...]] = {f"w{i}": (5,) for i in range(8)}
    wanted = {n: s for n, s in shapes.items() if int(n[1:]) % 2 == 0}
    schedule = lower(
        make_plan(catalogue_of(shapes), target_of(wanted)), max_gap=20, max_read=80, max_staging=80, waste=10
    )
    assert schedule.largest_batch <= 80


def test_an_output_that_needs_more_than_a_read_is_made_in_parts() -> None:
    stacked = TargetTensor("w", F32, (8, 4), {"": Slot(Region.whole((8, 4)), (2, 4, 4), Region.whole((2, 4, 4)))})
    rules = RuleSet(Join(("e.{i}",), "w", Stack()))
    plan = make_plan(catalogue_of({"e.0": (4, 4), "e.1": (4, 4)}), by_name([stacked]), rules)
    schedule = lower(plan, max_gap=0, max_read=64, max_staging=64, waste=1)
    assert [t.out for b in schedule.batches for t in b.tasks] == [
        Box((0, 0, 0), (1, 4, 4)),
        Box((1, 0, 0), (2, 4, 4)),
    ]


def test_a_computed_output_of_empty_inputs_is_still_made() -> None:
    custom = Custom("ones", TensorSpec(F32, (2,)))
    plan = make_plan(catalogue_of({"e.0": (0,)}), target_of({"w": (2,)}), RuleSet(Join(("e.{i}",), "w", custom)))
    (batch,) = lower(plan, max_gap=0, max_read=9, max_staging=9, waste=1).batches
    assert [(len(t.inputs), t.inputs[0].pieces) for t in batch.tasks] == [(1, ())]


def test_bytes_that_are_no_span_cannot_be_scheduled() -> None:
    hidden = TensorEntry("w", F32, (2,), (Chunk(None, None),))
    plan = make_plan(Catalogue([hidden], format="raw"), target_of({"w": (2,)}))
    with pytest.raises(PlanError, match="w: its bytes are no span of a file"):
        lower(plan, max_gap=0, max_read=9, max_staging=9, waste=1)
