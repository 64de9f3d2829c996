from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tensorferry.collector import collector_paused


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


def test_the_collector_is_off_within_and_on_again_afterwards() -> None:
    gc.enable()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_blocks_may_overlap_and_the_last_one_turns_it_on() -> None:
    gc.enable()
    first, second = collector_paused(), collector_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_an_error_turns_it_on_again() -> None:
    gc.enable()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_as_a_decorator_it_holds_for_each_call() -> None:
    gc.enable()
    seen = collector_paused()(gc.isenabled)
    assert [seen(), seen()] == [False, False]
    assert gc.isenabled()
