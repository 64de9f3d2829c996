"""How many threads torch takes for a thread of ours; other threads are left as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread

import pytest
import torch

from tensorferry.execute.pool import Readers
from tensorferry.numerics import threads
from tensorferry.numerics.threads import alone, take_share

pytestmark = pytest.mark.skipif(threads._omp_set_num_threads() is None, reason="torch was built without OpenMP")


@pytest.fixture(autouse=True)
def eight_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def seen_by_a_thread(act: Callable[[], object]) -> int:
    found: list[int] = []

    def work() -> None:
        act()
        found.append(torch.get_num_threads())

    thread = Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(("among", "share"), [(1, 8), (2, 4), (3, 2), (16, 1)])
def test_a_thread_takes_its_share(among: int, share: int) -> None:
    assert seen_by_a_thread(lambda: take_share(among)) == share
    assert torch.get_num_threads() == 8
    assert seen_by_a_thread(lambda: None) == 8


def test_alone_is_for_the_block_only() -> None:
    with alone():
        assert torch.get_num_threads() == 1
        assert seen_by_a_thread(lambda: None) == 8
    assert torch.get_num_threads() == 8


def test_readers_take_their_share() -> None:
    readers = Readers[int](4)
    assert readers.submit(torch.get_num_threads).result(60) == 2
    assert readers.close() == 0
