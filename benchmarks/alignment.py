"""What it is worth that values begin on a page of a file, as in those that ``tensorferry convert`` writes.

Two copies of a made-up Llama are loaded in turns: one as safetensors' own library writes it, whose values begin
wherever its header ends, and its conversion. Printed are medians, in seconds and in seconds of the processor, and how
much was copied once more after it had been read.

    python benchmarks/alignment.py [--folder PATH] [--gib 0.5] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from page_cache import bring, forget
from torch import nn

import tensorferry

ROW, ROWS = 2048, 2048
MIB = 1 << 20


def written(folder: Path, gib: float) -> dict[str, tuple[int, ...]]:
    """Write a file as safetensors does, with values at a multiple of 8 and of nothing more, and return its shapes."""
    from safetensors.torch import save_file

    folder.mkdir()
    block = torch.randint(-(1 << 15), 1 << 15, (ROWS, ROW), dtype=torch.int16)
    tensors = {f"{i}": (block ^ i).view(torch.bfloat16) for i in range(max(1, round(gib * 1024 * MIB / block.nbytes)))}
    path = folder / "model.safetensors"
    for more in range(8):
        save_file(tensors, path, {"text": "x" * 8 * more})
        if (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == 8:
            break
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def module_of(shapes: Mapping[str, tuple[int, ...]], device: str) -> nn.Module:
    return nn.ParameterDict(
        {n: nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device=device), False) for n, s in shapes.items()}
    )


def measure(folders: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], rounds: int) -> None:
    live, found, copied = module_of(shapes, "cpu"), defaultdict(list), {}
    for folder in folders.values():
        tensorferry.load(live, folder)
    for number in range(2 * rounds):
        for name, folder in list(folders.items())[:: 1 if number % 2 else -1]:
            for what, device in (("into touched memory", None), ("on meta", "meta")):
                model = live if device is None else module_of(shapes, device)
                state = "warm" if number < rounds else "cold"
                (forget if state == "cold" else bring)(folder.glob("*.safetensors"))
                began, worked = time.perf_counter(), time.process_time()
                report = tensorferry.load(model, folder)
                found[what, state, name].append((time.perf_counter() - began, time.process_time() - worked))
                copied[what, state, name] = report.copied_bytes
    print(f"{'':28} {'':14} {'s':>7} {'CPU s':>7} {'copied, MiB':>12}")
    for (what, state, name), times in sorted(found.items()):
        wall, busy = (statistics.median(t[i] for t in times) for i in (0, 1))
        print(f"{what + ', ' + state:28} {name:14} {wall:7.3f} {busy:7.3f} {copied[what, state, name] // MIB:12}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where files are made: on the disk to measure")
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folders = {"as it was": Path(made, "before"), "converted": Path(made, "after")}
        shapes = written(folders["as it was"], args.gib)
        tensorferry.convert(folders["as it was"], folders["converted"])
        measure(folders, shapes, args.rounds)


if __name__ == "__main__":
    main()
