from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

CODE = """if True:
    import sys
    import tensorferry
    from tensorferry.loaders.translating import translate
    with tensorferry.open_checkpoint(sys.argv[1]) as checkpoint:
        assert translate(checkpoint) == (checkpoint, {})
    print(*(name for name in ("gguf", "consolidated") if f"tensorferry.compat.{name}" in sys.modules))
"""


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("model.layers.0.self_attn.q_proj.weight", ""),
        ("layers.0.attention.wq.weight", "consolidated"),  # there is no params.json, which says the sizes
    ],
)
def test_a_translator_is_imported_for_names_that_may_be_its(name: str, imported: str, tmp_path: Path) -> None:
    save_file({name: torch.zeros(2)}, tmp_path / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == imported + "\n"
