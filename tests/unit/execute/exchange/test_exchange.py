"""Ranks that read for each other: each byte once, the right values on all, and nobody who waits for the dead."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from helpers.checkpoints import raw
from helpers.memory_storage import MemoryStorage
from tensorferry.core.boxes import Box, Region
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.dtypes import DTYPES
from tensorferry.core.lower import lower
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.core.schedule import Schedule
from tensorferry.core.transforms import TensorSpec
from tensorferry.errors import ReadError
from tensorferry.execute import ThreadedExecutor
from tensorferry.execute.base import Counters
from tensorferry.execute.exchange import Exchange, Party, exchange
from tensorferry.execute.exchange.links import Door, Link, connected, listen, neighbourhood
from tensorferry.execute.exchange.rows import Rows, SharedRows, offered
from tensorferry.execute.exchange.trays import Trays
from tensorferry.storage.base import File
from tensorferry.storage.local import LocalStorage

MIB = 1 << 20
LAYERS, ROWS, WIDTH = 3, 1500, 1024  # 2 KiB a row, 2.9 MiB a tensor

pytestmark = pytest.mark.skipif(not neighbourhood(), reason="this system has no such memory and sockets")


def values(layer: int) -> torch.Tensor:
    return torch.arange(ROWS * WIDTH).add(layer).to(torch.int16).view(torch.bfloat16).view(ROWS, WIDTH)


def contents() -> bytes:
    return bytes(1000) + b"".join(raw(values(layer)) for layer in range(LAYERS))


def schedule_for(start: int, stop: int, *, dtype: str = "BF16", max_read: int = 16 * MIB, file: str = "f") -> Schedule:
    """Return how a rank reads the columns from `start` to `stop` of all layers."""
    bf16, steps, parameters = DTYPES["BF16"], [], {}
    for layer in range(LAYERS):
        entry = TensorEntry.at(f"w{layer}", bf16, (ROWS, WIDTH), file, 1000 + layer * ROWS * WIDTH * 2)
        source = Source(entry, Region((ROWS, WIDTH), Box((0, start), (ROWS, stop))))
        steps.append(Step(f"w{layer}", Region.whole((ROWS, stop - start)), (source,)))
        parameters[f"w{layer}"] = TensorSpec(DTYPES[dtype], (ROWS, stop - start))
    plan = Plan(tuple(steps), parameters)
    return lower(plan, max_gap=4096, max_read=max_read, max_staging=64 * MIB, waste=100.0)


def empty(schedule: Schedule) -> dict[str, torch.Tensor]:
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    return {n: torch.zeros(spec.shape, dtype=kinds[spec.dtype.name]) for n, spec in schedule.plan.parameters.items()}


def met(schedules: list[Schedule | None], storages: list[Any], threads: int = 4) -> list[Exchange | None]:
    """Have ranks meet, each in a thread, as they would in processes of their own."""
    with ExitStack() as met:
        parties = [Party(*one) for one in zip(schedules, storages, strict=True)]
        for one in parties:
            met.callback(one.close)
        offers = [one.offer for one in parties]
        with ThreadPoolExecutor(len(parties)) as pool:
            return list(pool.map(lambda one: one[1].meet(offers, one[0], threads), enumerate(parties)))


def together(works: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(60) for future in [pool.submit(work) for work in works]]


def load(exchanges: list[Exchange | None], schedules: list[Schedule], storages: list[Any]) -> list[Any]:
    """Have all ranks load at once; return (counters, parameters) of each."""

    def of(rank: int) -> tuple[Counters, dict[str, torch.Tensor]]:
        found, mine = empty(schedules[rank]), exchanges[rank]
        with ExitStack() as until_loaded:
            if mine is not None:
                until_loaded.enter_context(mine)
            executor = ThreadedExecutor(4, shared=True, exchange=mine)
            return executor.run(schedules[rank], storages[rank], found), found

    return together([lambda rank=rank: of(rank) for rank in range(len(schedules))])  # type: ignore[misc]


@pytest.mark.parametrize("max_read", [16 * MIB, 2 * MIB])
@pytest.mark.parametrize("edges", [(0, 512, 1024), (0, 300, 1024), (0, 256, 512, 768, 1024)])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_each_byte_is_read_by_one_rank_and_is_right_on_all(edges: tuple[int, ...], max_read: int, dtype: str) -> None:
    cuts = list(pairwise(edges))
    schedules = [schedule_for(*cut, dtype=dtype, max_read=max_read) for cut in cuts]
    storages = [MemoryStorage({"f": contents()}) for _ in cuts]
    exchanges = met(list(schedules), storages)
    found = load(exchanges, schedules, storages)
    for (start, stop), (_, parameters) in zip(cuts, found, strict=True):
        for layer in range(LAYERS):
            wanted = values(layer)[:, start:stop].to(parameters[f"w{layer}"].dtype)
            assert torch.equal(parameters[f"w{layer}"].view(torch.int16), wanted.view(torch.int16))
    assert sum(counters.bytes_read for counters, _ in found) == LAYERS * ROWS * WIDTH * 2
    ranges = sorted((at, at + length) for storage in storages for _, at, length in storage.reads)
    assert all(one[1] <= two[0] for one, two in pairwise(ranges))
    assert all(counters.ways["from another rank"] for counters, _ in found)
    assert all(one and counters.staging_peak > one.nbytes for one, (counters, _) in zip(exchanges, found, strict=True))


class FarStorage(MemoryStorage):
    """Files in an object store, of which each read is a request."""

    def kind(self, path: str) -> Literal["remote"]:  # type: ignore[override]
        return "remote"


@pytest.mark.parametrize("max_read", [4 * MIB, 2 * MIB])
def test_what_comes_from_far_away_is_asked_for_by_one_rank(max_read: int) -> None:
    schedules = [schedule_for(0, 512, max_read=max_read), schedule_for(512, 1024, max_read=max_read)]
    storages = [FarStorage({"f": contents()}) for _ in schedules]
    found = load(met(list(schedules), storages), schedules, storages)
    for rank, (_, parameters) in enumerate(found):
        for layer in range(LAYERS):
            wanted = values(layer)[:, rank * 512 : rank * 512 + 512]
            assert torch.equal(parameters[f"w{layer}"].view(torch.int16), wanted.view(torch.int16))
    nbytes = LAYERS * ROWS * WIDTH * 2
    assert sum(counters.bytes_read for counters, _ in found) == nbytes
    assert sum(counters.ways["fetched"] for counters, _ in found) == nbytes
    assert sum(counters.ways["from another rank"] for counters, _ in found) == nbytes / 2
    ranges = sorted((at, at + length) for storage in storages for _, at, length in storage.reads)
    assert all(one[1] <= two[0] for one, two in pairwise(ranges))


NORM = 4096


def with_a_norm(start: int, stop: int) -> Schedule:
    """Return how a rank reads columns, and a vector that lies behind them, with one request."""
    bf16 = DTYPES["BF16"]
    columns = TensorEntry.at("w", bf16, (ROWS, WIDTH), "f", 1000)
    norm = TensorEntry.at("norm", bf16, (NORM,), "f", 1000 + ROWS * WIDTH * 2)
    part = Source(columns, Region((ROWS, WIDTH), Box((0, start), (ROWS, stop))))
    whole = Region.whole((NORM,))
    steps = Step("w", Region.whole((ROWS, stop - start)), (part,)), Step("norm", whole, (Source(norm, whole),))
    plan = Plan(steps, {"w": TensorSpec(bf16, (ROWS, stop - start)), "norm": TensorSpec(bf16, whole.view)})
    return lower(plan, max_gap=4096, max_read=16 * MIB, max_staging=64 * MIB, waste=100.0)


def many(start: int, stop: int) -> Schedule:
    """Return how a rank reads columns of many small matrices, with one request."""
    bf16, steps = DTYPES["BF16"], []
    for n in range(10):
        entry = TensorEntry.at(f"w{n}", bf16, (150, WIDTH), "f", 1000 + n * 150 * WIDTH * 2)
        source = Source(entry, Region((150, WIDTH), Box((0, start), (150, stop))))
        steps.append(Step(f"w{n}", Region.whole((150, stop - start)), (source,)))
    plan = Plan(tuple(steps), {step.parameter: TensorSpec(bf16, (150, stop - start)) for step in steps})
    return lower(plan, max_gap=4096, max_read=16 * MIB, max_staging=64 * MIB, waste=100.0)


def test_a_request_for_many_matrices_stays_one() -> None:
    schedules = [many(0, 512), many(512, 1024)]
    assert all(schedule.reads < 3 for schedule in schedules)
    far = [FarStorage({"f": contents()}) for _ in schedules]
    assert met(list(schedules), far) == [None, None]


def test_units_from_far_away_are_halves_of_the_longest_requests() -> None:
    plan = schedule_for(0, 512).plan
    one = plan.steps[0].sources[0].entry
    big = TensorEntry.at("w0", one.dtype, (4096, WIDTH), "f", 0)
    source = Source(big, Region((4096, WIDTH), Box((0, 0), (4096, 512))))
    step = Step("w0", Region.whole((4096, 512)), (source,))
    schedule = lower(
        Plan((step,), {"w0": TensorSpec(one.dtype, (4096, 512))}), max_gap=4096, max_read=8 * MIB, max_staging=64 * MIB,
        waste=100.0,
    )  # fmt: skip
    assert [need.rows.each for need in offered(schedule, lambda file: True)] == [4 * MIB]
    assert [need.rows.each for need in offered(schedule)] < [4 * MIB]


def test_a_request_for_several_tensors_stays_one() -> None:
    schedules = [with_a_norm(0, 512), with_a_norm(512, 1024)]
    assert [schedule.reads for schedule in schedules] == [1, 1]
    far = [FarStorage({"f": contents()}) for _ in schedules]
    assert met(list(schedules), far) == [None, None]
    near = [MemoryStorage({"f": contents()}) for _ in schedules]
    exchanges = met(list(schedules), near)
    assert None not in exchanges
    found = load(exchanges, schedules, near)
    norms = [parameters["norm"].view(torch.int16) for _, parameters in found]
    assert torch.equal(*norms)
    assert torch.equal(norms[0], values(1).view(torch.int16).view(-1)[:NORM])


@pytest.mark.parametrize(("far", "seconds"), [(True, 60.0), (False, 5.0)])
def test_who_asks_far_away_is_waited_for_longer(far: bool, seconds: float) -> None:
    schedules = [schedule_for(0, 512, max_read=2 * MIB), schedule_for(512, 1024, max_read=2 * MIB)]
    storages = [(FarStorage if far else MemoryStorage)({"f": contents()}) for _ in schedules]
    for one in met(list(schedules), storages):
        assert one is not None
        assert one._patience == seconds
        one.close()


def test_ranks_share_files_past_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(contents())
    with LocalStorage(tmp_path) as one, LocalStorage(tmp_path) as two:
        os.sync()
        fd = os.open(tmp_path / "f", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        schedules = [schedule_for(0, 512), schedule_for(512, 1024)]
        found = load(met(list(schedules), [one, two]), schedules, [one, two])
    for rank, (counters, parameters) in enumerate(found):
        assert torch.equal(parameters["w2"].view(torch.int16), values(2)[:, rank * 512 :][:, :512].view(torch.int16))
        assert "buffered: shared" not in counters.ways


def test_what_lies_in_the_page_cache_is_not_handed_on(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(contents())
    with LocalStorage(tmp_path) as one, LocalStorage(tmp_path) as two:
        (tmp_path / "f").read_bytes()
        schedules = [schedule_for(0, 512), schedule_for(512, 1024)]
        found = load(met(list(schedules), [one, two]), schedules, [one, two])
    assert [counters.ways.get("from another rank", 0) for counters, _ in found] == [0, 0]


def test_files_that_are_others_are_not_shared(tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
        (folder / "f").write_bytes(contents())
    with LocalStorage(folders[0]) as one, LocalStorage(folders[1]) as two:
        assert met([schedule_for(0, 512), schedule_for(512, 1024)], [one, two]) == [None, None]


@pytest.mark.parametrize("max_staging", [4 * MIB, 8 * MIB, 12 * MIB])
def test_what_is_handed_on_is_staged_within_the_bound(max_staging: int) -> None:
    plans = [schedule_for(0, 512).plan, schedule_for(512, 1024).plan]
    schedules = [lower(p, max_gap=4096, max_read=4 * MIB, max_staging=max_staging, waste=100.0) for p in plans]
    storages = [MemoryStorage({"f": contents()}) for _ in schedules]
    for rank, (counters, found) in enumerate(load(met(list(schedules), storages), schedules, storages)):
        assert counters.staging_peak <= max_staging
        assert torch.equal(found["w2"].view(torch.int16), values(2)[:, rank * 512 :][:, :512].view(torch.int16))


class Elsewhere(MemoryStorage):
    def kind(self, path: str) -> Any:
        return "network"


class Linked(MemoryStorage):
    """All names lead to one file."""

    def stat(self, path: str) -> File:
        return replace(super().stat(path), identity="the same")


def test_what_is_far_away_is_not_offered() -> None:
    assert Party(schedule_for(0, 512), Elsewhere({"f": contents()})).offer == ""


def test_rows_that_two_names_of_a_file_lead_to_are_not_offered() -> None:
    one, two = schedule_for(0, 512), schedule_for(512, 1024, file="g")
    steps = (*one.plan.steps, *(step._replace(parameter=f"again.{step.parameter}") for step in two.plan.steps))
    more = {f"again.{name}": spec for name, spec in two.plan.parameters.items()}
    plan = Plan(steps, {**one.plan.parameters, **more})
    both = lower(plan, max_gap=4096, max_read=4 * MIB, max_staging=64 * MIB, waste=100.0)
    apart = Party(both, MemoryStorage({"f": contents(), "g": contents()}))
    assert apart.offer
    apart.close()
    assert Party(both, Linked({"f": contents(), "g": contents()})).offer == ""


def test_a_rank_that_needs_all_of_the_same_rows_as_well_gets_them() -> None:
    schedules = []
    for start, stop in ((0, 512), (512, 1024)):
        columns, whole = schedule_for(start, stop).plan, schedule_for(0, 1024, dtype="F32").plan
        steps = (*columns.steps, *(step._replace(parameter=f"whole.{step.parameter}") for step in whole.steps))
        parameters = {**columns.parameters, **{f"whole.{name}": spec for name, spec in whole.parameters.items()}}
        plan = Plan(steps, parameters)
        schedules.append(lower(plan, max_gap=4096, max_read=3 * MIB, max_staging=64 * MIB, waste=100.0))
    storages = [MemoryStorage({"f": contents()}) for _ in schedules]
    for rank, (counters, found) in enumerate(load(met(list(schedules), storages), schedules, storages)):
        assert counters.ways["from another rank"]
        for layer in range(LAYERS):
            columns_of = values(layer)[:, rank * 512 :][:, :512]
            assert torch.equal(found[f"w{layer}"].view(torch.int16), columns_of.view(torch.int16))
            wanted = values(layer).to(torch.float32)
            assert torch.equal(found[f"whole.w{layer}"].view(torch.int32), wanted.view(torch.int32))


def test_a_rank_that_has_nothing_to_load_is_left_out() -> None:
    schedules = [schedule_for(0, 512), None, schedule_for(512, 1024)]
    storages = [MemoryStorage({"f": contents()}) for _ in schedules]
    first, none, last = met(schedules, storages)
    assert none is None
    assert first is not None
    assert last is not None
    for one in (first, last):
        one.close()


def test_a_rank_whose_neighbour_has_ended_reads_for_itself() -> None:
    schedules = [schedule_for(0, 512), schedule_for(512, 1024)]
    storages = [MemoryStorage({"f": contents()}) for _ in schedules]
    first, second = met(list(schedules), storages)
    assert first is not None
    assert second is not None
    second.close()
    ((counters, parameters),) = load([first], schedules[:1], storages[:1])
    assert torch.equal(parameters["w1"].view(torch.int16), values(1)[:, :512].view(torch.int16))
    assert counters.bytes_read == LAYERS * ROWS * WIDTH * 2


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for another rank until patience ends waits for longer than a test may take."""
    monkeypatch.setattr(exchange, "_PATIENCE", 1000.0)


@pytest.mark.usefixtures("patient")
def test_a_rank_whose_disk_fails_stops_nobody_else() -> None:
    def broken(path: str, offset: int, length: int) -> None:
        if offset > MIB:
            raise ReadError("the disk is broken")

    schedules = [schedule_for(0, 512), schedule_for(512, 1024)]
    storages = [MemoryStorage({"f": contents()}), MemoryStorage({"f": contents()}, before_read=broken)]
    exchanges, found = met(list(schedules), storages), empty(schedules[0])

    def good() -> None:
        with exchanges[0] as mine:  # type: ignore[union-attr]
            ThreadedExecutor(4, exchange=mine).run(schedules[0], storages[0], found)

    def bad() -> None:
        with exchanges[1] as mine, pytest.raises(ReadError, match="the disk is broken"):  # type: ignore[union-attr]
            ThreadedExecutor(4, exchange=mine).run(schedules[1], storages[1], empty(schedules[1]))

    together([good, bad])
    for layer in range(LAYERS):
        assert torch.equal(found[f"w{layer}"].view(torch.int16), values(layer)[:, :512].view(torch.int16))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_PATIENCE", 0.3)
    monkeypatch.setattr(exchange, "_MEETING", 0.3)


@pytest.mark.usefixtures("impatient")
def test_a_neighbour_that_hangs_is_done_without() -> None:
    schedules = [schedule_for(0, 512), schedule_for(512, 1024)]
    storages = [MemoryStorage({"f": contents()}) for _ in schedules]
    first, second = met(list(schedules), storages)  # the second never does anything
    ((counters, parameters),) = load([first], schedules[:1], storages[:1])
    assert torch.equal(parameters["w2"].view(torch.int16), values(2)[:, :512].view(torch.int16))
    assert counters.bytes_read == LAYERS * ROWS * WIDTH * 2
    assert second is not None
    second.close()


@pytest.mark.usefixtures("impatient")
def test_a_neighbour_that_never_comes_is_done_without() -> None:
    schedules = [schedule_for(0, 512), schedule_for(512, 1024)]
    storages = [MemoryStorage({"f": contents()}) for _ in schedules]
    parties = [Party(*one) for one in zip(schedules, storages, strict=True)]
    parties[1].close()
    mine = parties[0].meet([one.offer for one in parties], 0, 4)
    parties[0].close()
    ((counters, _),) = load([mine], schedules[:1], storages[:1])
    assert counters.bytes_read == LAYERS * ROWS * WIDTH * 2


@contextmanager
def sharing(*needs: tuple[int, int]) -> Iterator[tuple[list[Exchange], SharedRows]]:
    """Ranks that share rows of 4 bytes, a row to a unit, with what each needs; they have two trays, for one thread."""
    size = len(needs)
    rows, shared = Rows("f", 0, 32, 4), SharedRows(0, 4, dict(enumerate(needs)))
    doors, trays = [Door() for _ in needs], [Trays.made(2, 4) for _ in needs]
    addresses = {rank: door.address for rank, door in enumerate(doors)}

    def link(rank: int) -> dict[int, Link]:
        others = {other: address for other, address in addresses.items() if other != rank}
        return connected(doors[rank], rank, others, trays[rank], 5.0)

    links = together([lambda rank=rank: link(rank) for rank in range(size)])  # type: ignore[misc]
    for door in doors:
        door.close()
    exchanges = [Exchange(rank, {rows: shared}, trays[rank], links[rank], exchange._PATIENCE) for rank in range(size)]
    yield exchanges, shared
    for one in exchanges:
        one.close()


@pytest.fixture
def pair() -> Iterator[tuple[Exchange, Exchange, SharedRows]]:
    with sharing((0, 2), (2, 4)) as ((first, second), shared):
        yield first, second, shared


def going_on() -> bool:
    return False


def test_only_what_others_need_is_handed_on(pair: tuple[Exchange, Exchange, SharedRows]) -> None:
    first, second, shared = pair
    first.give(shared, 0, torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 0, going_on)
    with second.taken(shared, 0, 0, 4, going_on) as there:
        assert there is not None
        assert there.tolist() == [3, 4]


def test_a_tray_is_not_filled_again_before_it_was_emptied(pair: tuple[Exchange, Exchange, SharedRows]) -> None:
    first, second, shared = pair
    data = [torch.full((4,), n, dtype=torch.uint8) for n in range(3)]

    def give() -> None:
        for n in range(3):
            first.give(shared, 2 * n, data[n], 0, going_on)

    giving = threading.Thread(target=give)
    giving.start()
    time.sleep(0.2)
    assert giving.is_alive()  # two trays, and three units
    for n in range(3):
        with second.taken(shared, 2 * n, 0, 4, going_on) as there:
            assert there is not None
            assert there.tolist() == [n, n]
    giving.join(5)
    assert not giving.is_alive()


@pytest.mark.usefixtures("impatient")
def test_what_lies_there_for_a_rank_that_is_late_stays_as_it_is(pair: tuple[Exchange, Exchange, SharedRows]) -> None:
    first, second, shared = pair
    for n in range(3):  # two trays: the second one is given up before it has taken what is in them
        first.give(shared, 2 * n, torch.full((4,), n, dtype=torch.uint8), 0, going_on)
    for n in range(2):
        with second.taken(shared, 2 * n, 0, 4, going_on) as there:
            assert there is None or there.tolist() == [n, n]
    with second.taken(shared, 4, 0, 4, going_on) as there:
        assert there is None


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_gives_another_one_up_does_not_wait_for_it_again(
    pair: tuple[Exchange, Exchange, SharedRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, shared = pair
    for n in range(3):
        first.give(shared, 2 * n, torch.full((4,), n, dtype=torch.uint8), 0, going_on)
    monkeypatch.setattr(exchange, "_PATIENCE", 3600)
    first.give(shared, 6, torch.full((4,), 6, dtype=torch.uint8), 0, going_on)


def test_a_rank_in_time_is_not_given_up_because_another_one_has_ended() -> None:
    with sharing((0, 1), (1, 2), (2, 4)) as ((first, second, third), shared):
        for n in (0, 3):
            first.give(shared, n, torch.full((4,), n, dtype=torch.uint8), 0, going_on)
        third.close()
        first.give(shared, 6, torch.full((4,), 6, dtype=torch.uint8), 0, going_on)  # both trays wait for who has ended
        for n in (0, 3):
            with second.taken(shared, n, 0, 4, going_on) as there:
                assert there is not None
                assert set(there.tolist()) == {n}
        with second.taken(shared, 6, 0, 4, going_on) as there:
            assert there is None
        assert first._gone == {2}


def test_what_was_handed_on_can_be_taken_when_its_rank_has_ended(pair: tuple[Exchange, Exchange, SharedRows]) -> None:
    first, second, shared = pair
    first.give(shared, 0, torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 0, going_on)
    first.close()
    with second.taken(shared, 0, 0, 4, going_on) as there:
        assert there is not None
        assert there.tolist() == [3, 4]
    with second.taken(shared, 2, 0, 4, going_on) as there:
        assert there is None


@pytest.mark.usefixtures("patient")
def test_what_was_handed_on_is_taken_though_its_rank_has_ended_before_that_was_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()

    def late(links: dict[int, Link], *telling: Any) -> None:
        if 0 in links:  # the second one listens
            go_on.wait(10)
        listen(links, *telling)

    monkeypatch.setattr(exchange, "listen", late)
    with sharing((0, 2), (2, 4)) as ((first, second), shared):
        first.give(shared, 0, torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 0, going_on)
        first.close()
        second.give(shared, 1, torch.zeros(4, dtype=torch.uint8), 0, going_on)  # which reaches nobody
        threading.Timer(0.2, go_on.set).start()
        with second.taken(shared, 0, 0, 4, going_on) as there:
            assert there is not None
            assert there.tolist() == [3, 4]


def test_what_there_is_no_tray_for_is_not_waited_for(pair: tuple[Exchange, Exchange, SharedRows]) -> None:
    first, second, shared = pair
    data = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    first.give(shared, 0, data, 0, going_on)
    together([lambda: first.give(shared, 2, data, 0, going_on)])  # one thread more than there are trays for
    with second.taken(shared, 2, 0, 4, going_on) as there:
        assert there is None


@pytest.mark.usefixtures("patient")
def test_who_has_stopped_waits_for_nobody(pair: tuple[Exchange, Exchange, SharedRows]) -> None:
    _, second, shared = pair
    with second.taken(shared, 0, 0, 4, lambda: True) as there:
        assert there is None


def test_an_exchange_leaves_nothing_open() -> None:
    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = open_now(), threading.active_count()
    schedules = [schedule_for(0, 512), schedule_for(512, 1024)]
    storages = [MemoryStorage({"f": contents()}) for _ in schedules]
    load(met(list(schedules), storages), schedules, storages)
    assert (open_now(), threading.active_count()) == (before, threads)


def test_a_tray_that_cannot_have_memory_is_not_written_to(
    pair: tuple[Exchange, Exchange, SharedRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*arguments: Any) -> None:
        raise OSError("no space left")

    first, second, shared = pair
    monkeypatch.setattr(os, "posix_fallocate", none_left)
    first.give(shared, 0, torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 0, going_on)
    with second.taken(shared, 0, 0, 4, going_on) as there:
        assert there is None


def test_a_meeting_that_is_interrupted_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exchange, "connected", interrupted)
    storage = MemoryStorage({"f": contents()})
    one, two = (Party(schedule_for(*cut), storage) for cut in ((0, 512), (512, 1024)))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        one.meet([one.offer, two.offer], 0, 4)
    assert len(os.listdir("/proc/self/fd")) == before
    for each in (one, two):
        each.close()


def test_a_rank_without_a_thread_to_listen_with_reads_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    schedules, before = [schedule_for(0, 512), schedule_for(512, 1024)], len(os.listdir("/proc/self/fd"))
    storages = [MemoryStorage({"f": contents()}) for _ in schedules]
    with monkeypatch.context() as during:
        during.setattr(exchange, "started", none_left)
        assert met(list(schedules), storages) == [None, None]
    assert len(os.listdir("/proc/self/fd")) == before
