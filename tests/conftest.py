"""Settings that hold for every test: quiet machines or noisy ones, with or without a GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# Read by torch when it is imported: two workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read by triton when it is imported: where there is no device to compile for, its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

# Checks that other packages subclass, too: their assertions should say what was found.
pytest.register_assert_rewrite("helpers.format_conformance", "helpers.measuring")

# Wall time says nothing on a busy machine; in CI, the same examples are tried every time.
settings.register_profile("development", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "development")


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
