"""A test that needs real weights never passes without them: it fails with the way out, or skips with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.weights import variant, weights_file


def test_a_missing_file_fails_and_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_WEIGHTS", str(tmp_path))
    monkeypatch.delenv("TENSORFERRY_OFFLINE", raising=False)
    with pytest.raises(pytest.fail.Exception, match="run `make weights`"):
        weights_file("resemblyzer/pretrained.pt")


def test_offline_a_missing_layout_skips_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_WEIGHTS", str(tmp_path))
    monkeypatch.setenv("TENSORFERRY_OFFLINE", "1")
    with pytest.raises(pytest.skip.Exception, match="smollm2/bf16 is missing"):
        variant("bf16")


def test_a_file_in_the_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORFERRY_WEIGHTS", str(tmp_path))
    (tmp_path / "model.pt").touch()
    assert weights_file("model.pt") == tmp_path / "model.pt"
