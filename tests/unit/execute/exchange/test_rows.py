"""Which rows ranks read for each other: the same answer on all of them, whatever each needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import Chunk, Span, TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.core.schedule import Schedule
from tensorferry.core.transforms import TensorSpec
from tensorferry.execute.exchange.rows import Need, Offer, Rows, offered, shared_rows

MIB = 1 << 20
BF16 = DTYPES["BF16"]
ROWS, WIDTH = 6000, 1024  # 2 KiB a row, 11.7 MiB


def columns(start: int, stop: int, *, name: str = "w", offset: int = 1000, chunk: Any = None) -> Plan:
    entry = TensorEntry.at(name, BF16, (ROWS, WIDTH), "f", offset)
    entry = entry if chunk is None else TensorEntry(name, BF16, (ROWS, WIDTH), (chunk,))
    step = Step(name, Region.whole((ROWS, stop - start)), (Source(entry, Region((ROWS, WIDTH), box(start, stop))),))
    return Plan((step,), {name: TensorSpec(BF16, (ROWS, stop - start))})


def box(start: int, stop: int) -> Box:
    return Box((0, start), (ROWS, stop))


def scheduled(*plans: Plan, max_read: int = 32 * MIB) -> Schedule:
    steps = tuple(step for plan in plans for step in plan.steps)
    plan = Plan(steps, {name: spec for plan in plans for name, spec in plan.parameters.items()})
    return lower(plan, max_gap=4096, max_read=max_read, max_staging=128 * MIB, waste=100.0)


def offer(needs: list[Need], **changes: Any) -> Offer:
    told = {"neighbourhood": "here", "address": "a", "files": {"f": "one"}, "needs": tuple(needs)}
    return Offer(**{**told, **changes})


@pytest.mark.parametrize(("start", "stop"), [(0, 512), (512, 1024), (256, 300)])
def test_columns_are_offered_as_whole_rows_and_what_is_needed_of_each(start: int, stop: int) -> None:
    (need,) = offered(scheduled(columns(start, stop)))
    assert need[1:] == (2048, 2 * start, 2 * stop)
    assert need.rows == Rows("f", 1000, ROWS * 2048, 2000 * 2048)
    assert [length for _, length in need.rows.units] == [2000 * 2048] * 3


def test_a_tensor_that_is_read_in_parts_is_offered_in_parts() -> None:
    needs = offered(scheduled(columns(0, 512), max_read=5 * MIB))
    assert len(needs) > 2
    assert needs[0].rows.offset == 1000
    assert sum(need.rows.length for need in needs) == ROWS * 2048
    others = offered(scheduled(columns(512, 1024), max_read=5 * MIB))
    assert [need.rows for need in needs] == [need.rows for need in others]


def test_whole_rows_and_nearly_whole_ones_are_not_offered() -> None:
    assert not offered(scheduled(columns(0, 1024)))
    assert not offered(scheduled(columns(0, 800)))


def test_what_two_tasks_need_and_what_does_not_lie_row_by_row_is_not_offered() -> None:
    twice = scheduled(columns(0, 256), columns(0, 256, name="v"))
    assert not offered(twice)
    once = scheduled(columns(0, 256))
    assert not offered(replace(once, batches=once.batches * 2))
    sideways = columns(0, 256, chunk=Chunk(None, Span("f", 0, ROWS * 2048), (1, ROWS)))
    assert not offered(scheduled(sideways))


def test_an_offer_travels() -> None:
    told = offer([Need(Rows("f", 0, 4096, 2048), 1024, 0, 512)])
    assert Offer.from_text(told.to_text()) == told
    assert Offer.from_text("") is None


def test_all_ranks_number_what_they_share_alike_and_take_turns_at_reading() -> None:
    one, two = (offer(offered(scheduled(columns(*c)))) for c in ((0, 512), (512, 1024)))
    first, second = (shared_rows([None, one, two], rank) for rank in (1, 2))
    assert first == second
    ((rows, shared),) = first.items()
    assert shared.needs == {1: (0, 1024), 2: (1024, 2048)}
    assert [shared.reader(part) for part in range(5)] == [1, 2, 1, 2, 1]
    assert (shared.handed_on(1), shared.handed_on(2)) == ((1024, 2048), (0, 1024))
    assert rows.each == 2000 * 2048
    assert shared_rows([None, one, two], 0) == {}


def test_what_is_handed_on_is_what_all_of_the_others_need() -> None:
    offers = [offer(offered(scheduled(columns(n * 256, n * 256 + 256)))) for n in range(4)]
    (shared,) = shared_rows(offers, 2).values()
    assert [shared.handed_on(rank) for rank in range(4)] == [(512, 2048), (0, 2048), (0, 2048), (0, 1536)]


@pytest.mark.parametrize("changes", [{"neighbourhood": "elsewhere"}, {"files": {"f": "another"}}])
def test_ranks_elsewhere_and_other_files_of_the_same_name_are_told_apart(changes: dict[str, Any]) -> None:
    needs = offered(scheduled(columns(0, 512)))
    assert shared_rows([offer(needs), offer(needs, **changes)], 0) == {}


def test_ranks_that_need_rows_in_different_orders_share_nothing() -> None:
    a, b = Need(Rows("f", 0, 4096, 2048), 1024, 0, 512), Need(Rows("f", 8192, 4096, 2048), 1024, 0, 512)
    assert len(shared_rows([offer([a, b]), offer([a, b])], 0)) == 2
    assert shared_rows([offer([a, b]), offer([b, a])], 0) == {}


def test_orders_that_go_round_in_a_circle_are_not_shared_either() -> None:
    a, b, c = (Need(Rows("f", 8192 * n, 4096, 2048), 1024, 0, 512) for n in range(3))
    assert len(shared_rows([offer([a, b]), offer([b, c]), offer([a, c])], 0)) == 2
    assert [shared_rows([offer([a, b]), offer([b, c]), offer([c, a])], rank) for rank in range(3)] == [{}] * 3


def test_of_each_round_a_rank_takes_its_own_unit_first() -> None:
    (shared,) = shared_rows([offer([Need(Rows("f", 0, 6, 1), 1, 0, 1)])] * 2, 0).values()
    assert list(shared.in_order(5, 0)) == [0, 1, 2, 3, 4]
    assert list(shared.in_order(5, 1)) == [1, 0, 3, 2, 4]
