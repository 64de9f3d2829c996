"""Write a two-layer Llama with random weights in two shards, the small checkpoint of the examples in the documentation.

python examples/make_tiny_llama.py [tiny-llama]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Write the checkpoint into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Write the small Llama of the documentation's examples.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("tiny-llama"), help="where to; made if need be")
    write(parser.parse_args().folder)


def write(folder: Path) -> Path:
    """Write configuration and weights into `folder`, the same values each time, and return it."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="100KB")
    return folder


if __name__ == "__main__":
    main()
