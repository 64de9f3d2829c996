"""How long `tensorferry inspect --json` takes beside `python -c pass`, with the names and shapes of an 8B Llama.

The checkpoint is two sparse files of 291 tensors: only headers are real, and only headers are read. Both commands
run in turn, so that a busy machine slows both; medians are printed, their difference and their ratio. The goal is a
difference under 0.5 s.

    python benchmarks/inspect_time.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

GOAL = 0.5
LAYERS, WIDTH, HEADS, INNER, WORDS = 32, 4096, 1024, 14336, 128256

Shapes = Mapping[str, Sequence[int]]


def layer(n: int) -> Shapes:
    at = f"model.layers.{n}"
    return {
        f"{at}.input_layernorm.weight": (WIDTH,),
        f"{at}.mlp.down_proj.weight": (WIDTH, INNER),
        f"{at}.mlp.gate_proj.weight": (INNER, WIDTH),
        f"{at}.mlp.up_proj.weight": (INNER, WIDTH),
        f"{at}.post_attention_layernorm.weight": (WIDTH,),
        f"{at}.self_attn.k_proj.weight": (HEADS, WIDTH),
        f"{at}.self_attn.o_proj.weight": (WIDTH, WIDTH),
        f"{at}.self_attn.q_proj.weight": (WIDTH, WIDTH),
        f"{at}.self_attn.v_proj.weight": (HEADS, WIDTH),
    }


def write_checkpoint(folder: Path) -> None:
    ends = {
        "model.embed_tokens.weight": (WORDS, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (WORDS, WIDTH),
    }
    half = LAYERS // 2
    parts = [{k: v for n in some for k, v in layer(n).items()} for some in (range(half), range(half, LAYERS))]
    parts[1] |= ends
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_headers(folder / name, part)
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_headers(path: Path, shapes: Shapes) -> None:
    """Write a bf16 safetensors file of `shapes` whose values take no room on disk."""
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)


def seconds(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Time inspect beside an empty Python.")
    parser.add_argument("--rounds", type=int, default=15, help="how often each command runs")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        nothing = [sys.executable, "-c", "pass"]
        inspect = [sys.executable, "-m", "tensorferry", "inspect", folder, "--json"]
        pairs = [(seconds(nothing), seconds(inspect)) for _ in range(rounds + 1)][1:]  # the first fills caches
    empty, inspected = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"python -c pass        {empty:.3f} s")
    print(f"tensorferry inspect   {inspected:.3f} s   291 tensors in 2 files")
    verdict = "within" if inspected - empty < GOAL else "over"
    print(
        f"difference            {inspected - empty:.3f} s   {verdict} the goal of {GOAL} s; {inspected / empty:.1f} x"
    )


if __name__ == "__main__":
    main()
