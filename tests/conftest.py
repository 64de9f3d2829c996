"""Settings that hold for every test: quiet machines or noisy ones, with or without a GPU."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

# Read by torch when it is imported: two workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read by triton when it is imported: where there is no device to compile for, its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

from helpers.fake_vllm import FakeVllm, installed
from helpers.object_stores import Seaweed, seaweed
from helpers.ranks import Ranks

# Checks that other packages subclass, too: their assertions should say what was found.
pytest.register_assert_rewrite("helpers.format_conformance", "helpers.storage_conformance", "helpers.measuring")

# Wall time says nothing on a busy machine; in CI, the same examples are tried every time.
settings.register_profile("development", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "development")


def pytest_configure() -> None:
    """Listen to Ctrl-C: what a shell starts in the background ignores it, and so would the processes of tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run."""
    for marker, reason in _missing(items).items():
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing(items: list[pytest.Item]) -> dict[str, str]:
    missing: dict[str, str] = {}
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        missing["gpu"] = "no CUDA device on this machine"
    if importlib.util.find_spec("transformers") is None:
        missing["transformers"] = "transformers is not installed"
    return missing


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes that are ranks of one group; as the other groups, started when a test first asks for it."""
    with closing(Ranks(2)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """Three ranks of one group."""
    with closing(Ranks(3)) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four ranks of one group."""
    with closing(Ranks(4)) as ranks:
        yield ranks


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    """As much of vLLM as the plug-in uses, in place of it."""
    with installed() as fake:
        yield fake


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A real server of S3, started when a test first asks for it."""
    with seaweed(tmp_path_factory.mktemp("seaweed")) as running:
        yield running
