"""Groups of two, three and four ranks, each started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.ranks import Ranks


def _ranks(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    yield from _ranks(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    yield from _ranks(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    yield from _ranks(4)
