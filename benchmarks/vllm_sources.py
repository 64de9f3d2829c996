"""What the scripts for vLLM share: tiny checkpoints that lie in several files, and where modules are looked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

SOURCES = ("bgem3",)
"""BGE-M3, whose heads vLLM takes from torch files that nothing else reads, under prefixes that they do not have."""


def own_folder_last() -> None:
    """Have ``gguf.py`` beside this file not hide the library of that name, which older vLLMs import."""
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != here] + [here]


def write_sources(kind: str, folder: Path) -> None:
    """Write the checkpoint of `kind`, and its configuration."""
    import torch
    import transformers

    assert kind in SOURCES
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=256,
        max_position_embeddings=130, type_vocab_size=1,
    )  # fmt: skip
    model = transformers.XLMRobertaModel(config, add_pooling_layer=False).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    for name, rows in (("sparse_linear", 1), ("colbert_linear", 64)):
        values = {"weight": torch.randn(rows, 64), "bias": torch.randn(rows)}
        torch.save({leaf: value.to(torch.bfloat16) for leaf, value in values.items()}, folder / f"{name}.pt")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"architectures": ["BgeM3EmbeddingModel"]}))
