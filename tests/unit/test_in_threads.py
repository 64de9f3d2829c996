from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from tensorferry.in_threads import in_threads
from tensorferry.waiting import Flag


class Fault(Exception):
    pass


class Held:
    """Something that whoever calls holds."""


def test_results_are_in_the_order_of_the_items_whatever_ends_first() -> None:
    def late_for_small(item: int) -> int:
        time.sleep(0.01 * (4 - item))
        return item * item

    assert in_threads(late_for_small, range(5), 3) == [0, 1, 4, 9, 16]
    assert in_threads(late_for_small, [], 3) == []


def test_no_more_threads_than_asked_for_and_none_afterwards() -> None:
    def ours() -> int:
        return sum(thread.name == "tensorferry-files" for thread in threading.enumerate())

    def slow(item: int) -> int:
        time.sleep(0.002)
        return ours()

    assert 1 <= max(in_threads(slow, range(50), 4)) <= 4
    assert ours() == 0


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("failing", [1, 2])
def test_what_fails_is_the_first_item_and_holds_nothing(first: int, failing: int) -> None:
    """Whichever of two fails first: an error that knew itself would hold what the caller has until it is collected."""
    came = threading.Event()

    def work(item: int) -> int:
        if item != first:
            came.wait(2.0)
            time.sleep(0.05)  # until it is seen that the other one failed
        if failing == 2 or item == first:
            came.set()
            raise Fault(str(item))
        return item

    def call() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(Fault, match="^0$" if failing == 2 else f"^{first}$") as told:
            in_threads(work, [0, 1], 2)
        del told
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_with_stop_the_error_that_came_first_is_raised_and_others_are_told_to_end() -> None:
    stop = Flag()

    def work(item: int) -> None:
        until = time.monotonic() + 2.0
        while item == 0 and not stop.is_set():
            assert time.monotonic() < until
            time.sleep(0.001)
        raise Fault(str(item))

    with pytest.raises(Fault, match=r"^1$"):
        in_threads(work, [0, 1], 2, stop=stop)
    assert stop.is_set()


def test_after_an_error_nothing_more_is_begun() -> None:
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.001)
        raise Fault

    with pytest.raises(Fault):
        in_threads(work, range(1000), 1)
    assert len(begun) < 1000


def test_what_takes_a_while_is_done_by_several_threads() -> None:
    both = threading.Barrier(2)

    def waits_for_another(item: int) -> int:
        both.wait(2.0)
        return threading.get_ident()

    assert len(set(in_threads(waits_for_another, range(2), 8))) == 2
