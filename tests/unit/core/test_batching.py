"""Batches: in which order modules come, what is read for itself, and that bounds hold computing, too."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.core_values import by_name, catalogue_of, columns, entry, rows, slot, target_of
from tensorferry.config import ReadOptions
from tensorferry.core.batching import Range, Work, batches
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Catalogue
from tensorferry.core.cost import LOCAL, NETWORK, REMOTE, ReadCost
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan
from tensorferry.core.planning import make_plan
from tensorferry.core.rules import Place
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.schedule import Input, Piece, Read, Schedule, Task
from tensorferry.core.target import TargetTensor
from tensorferry.core.transforms import Add

BIG = 1 << 30
F32, BF16 = DTYPES["F32"], DTYPES["BF16"]


def lowered(plan: Plan, **given: Any) -> Schedule:
    options = ReadOptions()
    assert not plan.fatal
    return lower(
        plan,
        **{
            "max_gap": options.max_gap, "max_read": options.max_read, "max_staging": options.max_staging,
            "waste": options.waste, **given,
        },
    )  # fmt: skip


def most_modules_open(schedule: Schedule) -> int:
    """Return the most modules that were begun and not done, batch after batch."""
    left: dict[str, int] = {}
    for batch in schedule.batches:
        for task in batch.tasks:
            module = schedule.plan.steps[task.step].parameter.rpartition(".")[0]
            left[module] = left.get(module, 0) + 1
    opened: set[str] = set()
    most = 0
    for batch in schedule.batches:
        for task in batch.tasks:
            module = schedule.plan.steps[task.step].parameter.rpartition(".")[0]
            opened.add(module)
            left[module] -= 1
        most = max(most, len(opened))
        opened = {module for module in opened if left[module]}
    return most


def test_modules_are_done_one_after_the_other_where_a_file_holds_all_scales_before_all_weights() -> None:
    names = [f"layers.{i}.{leaf}" for leaf in ("scale", "weight") for i in range(50)]
    shapes = dict.fromkeys(names, (1000,))
    plan = make_plan(catalogue_of(shapes), target_of(shapes))
    assert most_modules_open(lowered(plan, max_read=8000)) == 1


def test_modules_that_two_files_share_are_done_before_others_begin() -> None:
    first, second = ([f"{i}.{leaf}" for i in range(20)] for leaf in ("a", "b"))
    entries = [
        entry(name, (1000,), file=file, at=4000 * i)
        for file, names in (("1", first), ("2", second))
        for i, name in enumerate(names)
    ]
    shapes = dict.fromkeys([*first, *second], (1000,))
    plan = make_plan(Catalogue(entries, format="raw"), target_of(shapes))
    assert most_modules_open(lowered(plan, max_read=8000)) == 1


def test_values_that_go_straight_to_their_place_are_not_read_with_those_that_are_cast() -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (64,), "b": (1 << 18,), "c": (64,), "d": (64,)}
    wide = {n: TargetTensor.plain(n, DTYPES["F64"] if n in "ac" else F32, s) for n, s in shapes.items()}
    (batch,) = lowered(make_plan(catalogue_of(shapes), wide)).batches
    assert [r.length for r in batch.reads] == [256, 1 << 20, 512]


def test_a_few_bytes_that_could_go_straight_are_staged_with_their_neighbours() -> None:
    shapes = {"a": (64,), "b": (64,), "c": (64,)}
    wide = {n: TargetTensor.plain(n, DTYPES["F64"] if n in "ac" else F32, s) for n, s in shapes.items()}
    (batch,) = lowered(make_plan(catalogue_of(shapes), wide)).batches
    assert [r.length for r in batch.reads] == [3 * 256]


def test_what_computing_takes_is_part_of_the_bound() -> None:
    plan = make_plan(
        catalogue_of({"w": (64, 16)}, dtype="BF16"),
        by_name([TargetTensor.plain("p", BF16, (64, 16))]),
        RuleSet(Place("w", "p", via=Add(1))),
    )
    (whole,) = lowered(plan).batches
    assert (whole.length, whole.room) == (2048, 4096)
    parts = lowered(plan, max_read=1024, max_staging=1024).batches
    assert (parts[0].length, parts[0].room) == (10 * 32, 10 * 64)
    assert sum(b.length for b in parts) == 2048
    assert all(b.staging <= 1024 for b in parts)


def test_staged_values_that_lie_askew_are_counted_twice() -> None:
    plan = make_plan(
        Catalogue([entry("w", (16,), at=2)], format="raw"), by_name([TargetTensor.plain("w", DTYPES["F64"], (16,))])
    )
    (batch,) = lowered(plan).batches
    assert (batch.length, batch.room) == (64, 64)


def test_columns_of_a_row_parallel_layer_are_read_as_runs_and_nothing_beside_them() -> None:
    """The down projection of a Llama of 70 billion parameters, for one rank of eight: runs of 7 KiB every 56 KiB."""
    part = columns((8192, 28672), 3584, 7168)
    target = TargetTensor("w", BF16, (8192, 3584), {"": slot(Region.whole((8192, 3584)), (8192, 28672), part)})
    schedule = lowered(make_plan(catalogue_of({"w": (8192, 28672)}, dtype="BF16"), by_name([target])))
    assert schedule.bytes_read == schedule.plan.bytes_needed
    assert schedule.reads == 8192
    assert sum(len(b.reads) for b in schedule.batches) == 4
    assert all(r.run == 7168 and r.stride == 57344 for b in schedule.batches for r in b.reads)


def test_columns_whose_pages_would_all_be_read_anyway_are_read_with_what_is_between() -> None:
    part = columns((2048, 2048), 512, 1024)  # 1 KiB of each 4 KiB
    target = TargetTensor("w", BF16, (2048, 512), {"": slot(Region.whole((2048, 512)), (2048, 2048), part)})
    schedule = lowered(make_plan(catalogue_of({"w": (2048, 2048)}, dtype="BF16"), by_name([target])))
    assert schedule.reads == 1


def test_rows_and_experts_are_read_with_hardly_anything_beside_them() -> None:
    shapes = {f"layers.{i}.{n}": (5632, 2048) for i in range(9) for n in ("gate", "up")}
    half = {
        n: TargetTensor(
            n, BF16, (1408, 2048), {"": slot(Region.whole((1408, 2048)), (5632, 2048), rows(s, 1408, 2816))}
        )
        for n, s in shapes.items()
    }
    schedule = lowered(make_plan(catalogue_of(shapes, dtype="BF16"), half))
    assert schedule.bytes_read <= 1.02 * schedule.plan.bytes_needed
    experts = {n: s for n, s in shapes.items() if int(n.split(".")[1]) % 4 == 1}
    schedule = lowered(make_plan(catalogue_of(shapes, dtype="BF16"), target_of(experts, dtype="BF16")))
    assert schedule.bytes_read <= 1.02 * schedule.plan.bytes_needed


def test_a_request_costs_its_pages_and_some_more() -> None:
    assert LOCAL.of(0, 4096) == LOCAL.of(0, 1) == 12288
    assert LOCAL.of(4095, 2) == 16384
    assert REMOTE.of(5, 100) == REMOTE.request + 100
    assert LOCAL.gap < NETWORK.gap < REMOTE.gap


@pytest.mark.parametrize("cost", [LOCAL, NETWORK, REMOTE])
def test_reading_over_the_widest_hole_costs_no_more_than_skipping_it(cost: Any) -> None:
    over = cost.of(0, 100 * cost.page + cost.gap)
    assert over <= 2 * cost.of(0, 50 * cost.page) + cost.page
    assert over + cost.page >= 2 * cost.of(0, 50 * cost.page)


def test_an_input_that_needs_no_bytes_is_an_input_of_its_task_all_the_same() -> None:
    box, none = Box((0,), (2,)), Box((0,), (0,))
    range_ = Range("f", 8, 2, 2, 1, 0, 1, (1,), box)
    work = Work("m", 0, None, (none, box), (range_,), False, 0)
    (batch,) = batches([work], {"f": 0}, ReadCost(0, BIG, 1.0), BIG)
    assert batch.reads == (Read("f", 8, 2),)
    assert batch.tasks == (Task(0, None, (Input(0, none, ()), Input(1, box, (Piece(0, 0, (1,), box),)))),)
