"""The SmolLM2 layouts: the same weights, in the files that each layout is known by."""

from __future__ import annotations

from pathlib import Path

import pytest

import make_variants
from helpers.weights import variant
from make_variants import LAYOUTS, VERSION, is_written, main

SHARDS = [f"-{number:05}-of-00005" for number in range(1, 6)]
FILES = {
    "f32": ["model.safetensors"],
    "f16": ["model.safetensors"],
    "bf16": ["model.safetensors"],
    "bf16-sharded": [*(f"model{shard}.safetensors" for shard in SHARDS), "model.safetensors.index.json"],
    "bf16-bin": ["pytorch_model.bin"],
    "bf16-bin-legacy": ["pytorch_model.bin"],
    "bf16-bin-sharded": [*(f"pytorch_model{shard}.bin" for shard in SHARDS), "pytorch_model.bin.index.json"],
}


def test_every_layout_has_a_writer() -> None:
    assert {"f32", "f16", "bf16", *make_variants.BF16_LAYOUTS} == set(LAYOUTS)


def test_layouts_count_as_written_when_all_are_stamped_with_this_version(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        assert not is_written(tmp_path)
        (tmp_path / "smollm2" / layout).mkdir(parents=True)
        (tmp_path / "smollm2" / layout / ".complete").write_text(VERSION)
    assert is_written(tmp_path)


def test_without_the_gguf_it_says_what_to_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TENSORFERRY_OFFLINE", raising=False)
    assert main(["--cache", str(tmp_path)]) == 1
    assert "run tools/fetch_weights.py first" in capsys.readouterr().err


@pytest.mark.weights
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_holds_its_weight_files(layout: str) -> None:
    found = sorted(path.name for path in variant(layout).iterdir() if path.name.startswith(("model", "pytorch_model")))
    assert found == FILES[layout]
