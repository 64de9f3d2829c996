"""Threads that nobody has to wait for."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from tensorferry.execute.pool import Readers


def test_work_is_done_in_order_and_errors_reach_whoever_asks() -> None:
    readers, done = Readers[object](1), list[int]()
    futures = [readers.submit(done.append, n) for n in range(5)]
    failing = readers.submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(60)
    assert done == [0, 1, 2, 3, 4]
    assert all(f.done() for f in futures)
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
    second: Future[bool] = readers.submit(wait)
    assert begun.wait(60)
    assert readers.close(0) == 1
    go_on.set()
    assert first.result(60)
    assert readers.close() == 0
    assert second.cancelled()


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
