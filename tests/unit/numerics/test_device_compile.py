"""Kernels for GPUs compile without one, to instructions that keep the bits of C: nothing fused, nothing flushed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorferry.numerics.gguf.families import FAMILY

pytest.importorskip("triton", reason="kernels for GPUs are written in Triton")


def test_every_kernel_compiles_and_rounds_products_and_sums_apart(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "helpers.compile_kernels"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, list[str]] = json.loads(run.stdout)
    assert {name.split()[0] for name in found} == set(FAMILY)
    assert "mul.rn.f32" in found["Q4_K bfloat16"]
    assert "sub.rn.f32" in found["Q4_K bfloat16"]
    used = {instruction for some in found.values() for instruction in some}
    assert not [i for i in used if i.startswith(("fma", "mad")) or "ftz" in i or i in ("mul.f32", "add.f32", "sub.f32")]
