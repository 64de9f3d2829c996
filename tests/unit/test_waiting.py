"""Waiting for threads: whatever moment an interrupt chooses, it comes as it is, and whoever waits afterwards can."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref

import pytest

from helpers.interrupts import interrupted_at
from tensorferry.waiting import Flag, Outcome, joined, started


class Fault(Exception):
    pass


class Held:
    """Something that whoever works, or waits, holds."""


def test_a_result_is_handed_over_to_who_asks() -> None:
    outcome = Outcome[Held]()
    with pytest.raises(queue.Empty):
        outcome.result(0.001)
    outcome.done_by(Held)
    assert isinstance(outcome.result(0), Held)
    with pytest.raises(queue.Empty):
        outcome.result(0)


def test_an_error_holds_nothing_of_who_worked_or_waited() -> None:
    def work(held: Held) -> None:
        raise Fault

    def call(ask: bool) -> weakref.ref[Held]:
        held, outcome = Held(), Outcome[None]()
        thread = threading.Thread(target=outcome.done_by, args=(work, held))
        thread.start()
        thread.join()
        if ask:
            with pytest.raises(Fault):
                outcome.result()
        return weakref.ref(held)

    gc.disable()
    try:
        assert call(ask=True)() is None
        assert call(ask=False)() is None
    finally:
        gc.enable()


def test_an_interrupt_at_any_step_of_waiting_is_an_interrupt() -> None:
    """With `concurrent.futures`, some steps end as RuntimeError, "cannot release un-acquired lock"."""

    def scene(outcome: Outcome[int]) -> int:
        stop = Flag()
        thread = threading.Thread(target=outcome.done_by, args=(lambda: 0 if stop.is_set() else 1,), daemon=True)
        try:
            started(thread)
            return outcome.result(60)
        finally:
            stop.set()
            joined(thread, 60)

    with interrupted_at(0, "waiting.py", "threading.py") as steps:
        assert scene(Outcome()) == 1
    assert steps.seen > 10
    late = 0
    for step in range(1, steps.seen + 1):
        begun = time.monotonic()
        with interrupted_at(step, "waiting.py", "threading.py"):
            try:
                scene(Outcome())
                late += 1  # it took fewer steps than the first time
            except KeyboardInterrupt:
                pass
        assert time.monotonic() - begun < 30, step
    assert late < steps.seen / 2
