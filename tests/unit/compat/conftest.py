"""What several tests of adapters start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.fake_vllm import FakeVllm, installed


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    with installed() as fake:
        yield fake
