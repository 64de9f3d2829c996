"""Parameters as bytes, made ahead in the order in which they are expected, and in any other one as well."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import pytest

from helpers.core_values import catalogue_of, target_of
from helpers.memory_storage import MemoryStorage
from tensorferry.config import ReadOptions
from tensorferry.core.boxes import Shape
from tensorferry.core.planning import make_plan
from tensorferry.errors import PlanError, ReadError
from tensorferry.execute.production import Production

SHAPES: dict[str, Shape] = {"a": (700, 9), "b": (), "empty": (0, 4), "c": (3000,), "d": (2, 2)}
DATA = bytes(n * 7 % 251 for n in range(4 * (700 * 9 + 1 + 3000 + 4)))
SMALL = ReadOptions(max_staging=8192, max_read=4096, threads=1)


def production(storage: MemoryStorage, order: Sequence[str] = tuple(SHAPES), *, digested: bool = False) -> Production:
    plan = make_plan(catalogue_of(SHAPES), target_of(SHAPES))
    return Production(plan, storage, SMALL, order, digested=digested)


def storage() -> MemoryStorage:
    return MemoryStorage({"model.safetensors": DATA})


def expected(name: str) -> bytes:
    entry = catalogue_of(SHAPES)[name]
    assert entry.span is not None
    return DATA[entry.span.offset : entry.span.offset + entry.span.length]


def test_parameters_come_in_chunks_that_are_small_and_together_are_their_bytes() -> None:
    with production(storage()) as making:
        for name in SHAPES:
            chunks = [bytes(chunk) for chunk in making.chunks(name)]
            assert b"".join(chunks) == expected(name)
            assert max(map(len, chunks)) <= SMALL.max_staging // 4
        assert making.counters.bytes_read == len(DATA)
        assert making.counters.staging_peak <= SMALL.max_staging


def test_another_order_costs_reads_and_gives_the_same() -> None:
    with production(storage()) as making:
        found = {name: b"".join(map(bytes, making.chunks(name))) for name in reversed(SHAPES)}
        assert found == {name: expected(name) for name in SHAPES}
        assert making.counters.bytes_read >= len(DATA)


def test_one_that_was_left_in_the_middle_begins_anew() -> None:
    with production(storage()) as making:
        assert len(next(iter(making.chunks("a")))) < len(expected("a"))
        assert b"".join(map(bytes, making.chunks("a"))) == expected("a")
        assert b"".join(map(bytes, making.chunks("b"))) == expected("b")


def test_digests_are_of_what_was_taken_whole() -> None:
    with production(storage(), digested=True) as making:
        next(iter(making.chunks("a")))
        assert making.digests == {}
        for name in SHAPES:
            list(making.chunks(name))
        assert making.digests == {name: hashlib.sha256(expected(name)).hexdigest() for name in SHAPES}


def test_a_name_that_was_not_announced_is_refused() -> None:
    with production(storage(), ["a"]) as making, pytest.raises(PlanError, match="'b' is none of those"):
        list(making.chunks("b"))


def test_an_error_of_the_storage_comes_with_the_portion_and_no_thread_is_left() -> None:
    def refuse(path: str, offset: int, length: int) -> None:
        if offset > 8000:
            raise ReadError("the disk is gone")

    before = threading.active_count()
    failing = MemoryStorage({"model.safetensors": DATA}, before_read=refuse)
    with production(failing) as making, pytest.raises(ReadError, match=r"the disk is gone \(while reading a\)"):
        list(making.chunks("a"))
    assert threading.active_count() == before
