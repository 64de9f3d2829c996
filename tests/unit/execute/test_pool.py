"""Threads that nobody has to wait for."""

from __future__ import annotations

import queue
import threading

import pytest

from tensorferry.execute.pool import Readers
from tensorferry.waiting import Dropped, Outcome


def test_work_is_done_in_order_and_errors_reach_whoever_asks() -> None:
    readers, done = Readers[object](1), list[int]()
    outcomes = [readers.submit(done.append, n) for n in range(5)]
    failing = readers.submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(60)
    assert done == [0, 1, 2, 3, 4]
    assert [each.result(0) for each in outcomes] == [None] * 5
    assert readers.close() == 0


def test_no_more_threads_are_started_than_there_is_work() -> None:
    before = threading.active_count()
    readers = Readers[int](8)
    readers.submit(lambda: 1).result(60)
    assert threading.active_count() == before + 1
    assert readers.close() == 0
    assert threading.active_count() == before


def test_what_was_not_begun_is_dropped() -> None:
    readers, begun, go_on = Readers[bool](1), threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return go_on.wait(60)

    first = readers.submit(wait)
    second = readers.submit(wait)
    assert begun.wait(60)
    assert readers.close(0) == 1
    go_on.set()
    assert first.result(60)
    assert readers.close() == 0
    with pytest.raises(Dropped, match="nobody waits for what was to be done"):
        second.result(60)


def test_outcomes_are_put_where_they_are_waited_for_as_they_come() -> None:
    readers, ended, go_on = Readers[str](2), queue.SimpleQueue[Outcome[str]](), threading.Event()

    def late() -> str:
        assert go_on.wait(60)
        return "late"

    readers.submit(late, ended=ended)
    readers.submit(lambda: "early", ended=ended)
    assert ended.get(timeout=60).result() == "early"
    go_on.set()
    assert ended.get(timeout=60).result() == "late"
    assert readers.close() == 0


def test_a_thread_that_hangs_is_left_behind_and_ends_with_its_work() -> None:
    readers, begun, go_on = Readers[bool](2), threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return go_on.wait(60)

    hanging = readers.submit(hang)
    assert begun.wait(60)
    assert readers.close(0.01) == 1
    go_on.set()
    assert hanging.result(60)
    assert readers.close() == 0
