"""`make demo` shows what the README promises of it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from fetch_weights import default_cache
from helpers.weights import minilm

DEMO = Path(__file__).resolve().parent.parent.parent / "examples" / "minilm.py"


@pytest.mark.weights
@pytest.mark.transformers
def test_the_demo_prints_the_report_and_the_published_cosines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    minilm()
    monkeypatch.setattr(sys, "argv", [str(DEMO), str(default_cache())])
    runpy.run_path(str(DEMO), run_name="__main__")
    report, _, cosines = capsys.readouterr().out.partition("\n\n")
    assert report.startswith("loaded 103 parameters from ")
    assert [line.split()[0] for line in cosines.splitlines()] == ["0.6660", "0.1046", "0.1411"]
