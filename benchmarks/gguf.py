"""How fast the block types of GGUF decode, and a whole model loads: ours beside gguf-py, libgguf and transformers.

Every type is decoded by all of them in turn, so that a busy machine slows all; the least CPU time of all rounds is
printed, of all threads, for a gigabyte of output. What comes out is compared first. The bytes are random, with scales
as a model has them; rows have 4096 elements. Destinations are made, and kernels compiled, before the clock starts.

Goals: four times as fast as gguf-py on every type, and not slower than libgguf on the K and the 4-bit types, in
float32, which is all that those two give; bfloat16 is ours alone (others need a second pass).

With --model, a real file is loaded, each time in a process of its own (`gguf_load.py`), those that are compared taking
turns, into float32 and bfloat16; of all rounds the least is taken of each number. What comes out is compared, too.
Goals: three times as fast as transformers, and at most half its peak, beside what both import.

    python benchmarks/gguf.py [--elements 4194304] [--rounds 15] [--types Q4_K,Q6_K] [--model FILE] [--loads 3]
                              [--results FOLDER]

--results writes gguf.json and gguf.md there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]  # this file is not gguf-py

import gguf  # noqa: E402
import libgguf  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from tensorferry.core.dtypes import DTYPES, DType  # noqa: E402
from tensorferry.numerics import dequantize as ours  # noqa: E402

ROW = 4096
SCALES: Mapping[str, tuple[int, ...]] = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
"""At which bytes of a block its float16 scales are, where not at the first."""
FOUR_BITS_AND_K = {"Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"} | {f"Q{n}_K" for n in (2, 3, 4, 5, 6)}

COLUMNS = ("numba", "torch", "gguf-py", "libgguf", "numba bf16")

LOADERS = ("transformers", "tensorferry", "torch", "numba")
"""Who loads a whole model: tensorferry as it decides, and in torch alone, and with numba from the start."""
DTYPES_LOADED = ("float32", "bfloat16")
LOAD_HEAD = (
    "", "", "load s", "load CPU s", "with imports CPU s", "weights MiB", "peak over imports MiB", "peak MiB",
    "load is faster", "in CPU time", "with imports", "of their peak over imports", "of their peak",
)  # fmt: skip

Run = Callable[[], object]


class Decoded(NamedTuple):
    """By type, CPU seconds for a gigabyte of output of each decoder; and goals that are missed, in words."""

    costs: Mapping[str, Mapping[str, float]]
    missed: list[str]


def blocks_of(dtype: DType, elements: int) -> np.ndarray:
    """Return random rows of blocks, with scales between 0.006 and 0.03."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (elements // dtype.block, dtype.block_bytes), dtype=np.uint8)
    for at in SCALES.get(dtype.name, (0,)):
        raw[:, at + 1] = rng.integers(0x1E, 0x28, len(raw))
    if dtype.name == "MXFP4":
        raw[:, 0] = rng.integers(115, 125, len(raw))
    if dtype.name == "NVFP4":
        raw[:, :4] &= 0x3F
    if dtype.name == "IQ1_M":
        raw[:, 53] &= 0x0F
        raw[:, 55] = raw[:, 55] & 0x0F | 0x20
    return raw.reshape(-1, ROW // dtype.block * dtype.block_bytes)


def runs_of(dtype: DType, raw: np.ndarray) -> dict[str, Run]:
    """Return what is measured, by name, for those that know the type."""
    packed, elements = torch.from_numpy(raw), raw.size // dtype.block_bytes * dtype.block
    wide = torch.empty(elements // ROW, ROW)
    short = wide.to(torch.bfloat16)

    def in_torch() -> None:
        with mock.patch.object(ours, "kernel_of", return_value=None):
            ours.decode_into(dtype, packed, wide)

    runs: dict[str, Run] = {"torch": in_torch}
    if ours.kernel_of(dtype.name) is not None:
        runs["numba"] = lambda: ours.decode_into(dtype, packed, wide)
        runs["numba bf16"] = lambda: ours.decode_into(dtype, packed, short)
    kind = gguf.GGMLQuantizationType.__members__.get(dtype.name)
    if kind is not None:
        if dtype.name != "Q1_0":
            runs["gguf-py"] = lambda: gguf.quants.dequantize(raw, kind)
        out = wide.numpy()  # the same memory for all: pages differ in how fast they are
        runs["libgguf"] = lambda: (libgguf.dequantize_rows_into_raw(int(kind), raw, out, len(raw), ROW), out)[1]
    return runs


def check(dtype: DType, raw: np.ndarray, runs: Mapping[str, Run]) -> None:
    """Compare what others make of the first rows with what we make, bit for bit."""
    expected = ours.dequantize(dtype, torch.from_numpy(raw)).numpy()
    for name in runs.keys() & {"gguf-py", "libgguf"}:
        values = np.asarray(runs[name]()).reshape(expected.shape)
        assert np.array_equal(values.view(np.int32), expected.view(np.int32)), (dtype.name, name)


def measured(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Return the least CPU seconds of each, over all rounds."""
    least = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.process_time()
            run()
            least[name] = min(least[name], time.process_time() - began)
    return least


def row_of(name: str, cost: Mapping[str, float]) -> str:
    """Return a line of the table."""
    cells = [f"{cost[c]:11.3f}" if c in cost else f"{'-':>11}" for c in COLUMNS]
    return f"{name:8}" + "".join(cells) + "".join(f"{times(cost, c):>11}" for c in ("gguf-py", "libgguf"))


def times(cost: Mapping[str, float], other: str) -> str:
    return f"{cost[other] / ours_of(cost):.1f}x" if other in cost else "-"


def ours_of(cost: Mapping[str, float]) -> float:
    return cost.get("numba", cost["torch"])


def missed(name: str, cost: Mapping[str, float]) -> list[str]:
    """Return which goals are not met."""
    slower = name in FOUR_BITS_AND_K and cost.get("libgguf", float("inf")) < ours_of(cost)
    short = cost.get("gguf-py", float("inf")) < 4 * ours_of(cost)
    return [
        *([f"{name}: {times(cost, 'gguf-py')} as fast as gguf-py, not 4x"] if short else []),
        *([f"{name}: {times(cost, 'libgguf')} as fast as libgguf"] if slower else []),
    ]


def decoded(elements: int, rounds: int, types: Sequence[str]) -> Decoded:
    """Measure every type, print a line for each, and return the costs and which goals are missed."""
    torch.set_num_threads(1)
    ours._WORTH = {"cpu": 0}
    print(f"{'CPU seconds for 10^9 bytes of output':63}{'numba is faster than':>22}")
    print(f"{'':8}" + "".join(f"{c:>11}" for c in (*COLUMNS, "gguf-py", "libgguf")))
    costs: dict[str, dict[str, float]] = {}
    for name in types:
        dtype = DTYPES[name]
        raw = blocks_of(dtype, elements)
        runs = runs_of(dtype, raw)
        check(dtype, raw, runs)
        least = measured(runs, rounds)
        costs[name] = {c: s / elements / (2 if c == "numba bf16" else 4) * 1e9 for c, s in least.items()}
        print(row_of(name, costs[name]), flush=True)
    return Decoded(costs, [line for name, cost in costs.items() for line in missed(name, cost)])


Loads = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By dtype, then by who loads: the least of each number."""


def loaded(file: Path, rounds: int) -> Loads:
    """Load `file` by all in turn, `rounds` times, and return the least of each number."""
    found: dict[str, dict[str, dict[str, float]]] = {dtype: {} for dtype in DTYPES_LOADED}
    digests: dict[str, set[str]] = {dtype: set() for dtype in DTYPES_LOADED}
    for _ in range(rounds):
        for dtype, who in product(DTYPES_LOADED, LOADERS):
            child = [sys.executable, str(Path(__file__).with_name("gguf_load.py")), who, dtype, str(file)]
            told = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            digests[dtype].add(told.pop("digest"))
            before = found[dtype].get(who, told)
            found[dtype][who] = {name: min(value, before[name]) for name, value in told.items()}
    assert all(len(some) == 1 for some in digests.values()), digests
    return found


def load_rows(loads: Loads) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of loads, beside transformers in times as fast and in parts of its peak."""
    for dtype, by_whom in loads.items():
        theirs = by_whom["transformers"]
        for who, cost in by_whom.items():
            beside = (
                f"{theirs['load_s'] / cost['load_s']:.1f}x", f"{theirs['load_cpu_s'] / cost['load_cpu_s']:.1f}x",
                f"{theirs['total_cpu_s'] / cost['total_cpu_s']:.1f}x",
                f"{cost['over_import_mib'] / theirs['over_import_mib']:.2f}",
                f"{cost['peak_mib'] / theirs['peak_mib']:.2f}",
            )  # fmt: skip
            numbers = (f"{cost[name]:.2f}" for name in ("load_s", "load_cpu_s", "total_cpu_s"))
            memory = (f"{cost[name]:.0f}" for name in ("weights_mib", "over_import_mib", "peak_mib"))
            yield (dtype, who, *numbers, *memory, *beside)


def load_goals(loads: Loads) -> Iterator[str]:
    """Yield which goals of loading are not met."""
    for dtype, by_whom in loads.items():
        mine, theirs = by_whom["tensorferry"], by_whom["transformers"]
        faster = theirs["load_cpu_s"] / mine["load_cpu_s"]
        part = mine["over_import_mib"] / theirs["over_import_mib"]
        if faster < 3:
            yield f"{dtype}: {faster:.1f}x as fast as transformers, not 3x"
        if part > 0.5:
            bare = mine["weights_mib"] / theirs["over_import_mib"]
            yield f"{dtype}: {part:.3f} of the peak of transformers, not half (the weights alone are {bare:.2f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """Return what this was measured on, and when."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "gguf", "numba"))
    return f"{date.today()}, {cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def write(folder: Path, done: Decoded | None, loads: Loads, goals: Sequence[str]) -> None:
    """Write what was measured as JSON and as a page."""
    command = f"python {' '.join(['benchmarks/gguf.py', *(Path(a).name if '/' in a else a for a in sys.argv[1:])])}"
    said = {"machine": machine(), "command": command, "missed": list(goals)}
    parts = [f"# GGUF\n\n{said['machine']}\n\n`{command}`"]
    if done is not None:
        cells = ([name, *(f"{cost[c]:.3f}" if c in cost else "-" for c in COLUMNS), times(cost, "gguf-py"),
                  times(cost, "libgguf")] for name, cost in done.costs.items())  # fmt: skip
        head = ["", *COLUMNS, "than gguf-py", "than libgguf"]
        parts.append("## CPU seconds for 10^9 bytes of output\n\n" + table(head, cells))
    if loads:
        parts.append("## A whole model\n\n" + table(LOAD_HEAD, load_rows(loads)))
    parts.append("## Goals that are not met\n\n" + ("\n".join(f"* {goal}" for goal in goals) or "None."))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gguf.md").write_text("\n\n".join(parts) + "\n")
    data = {**said, "decode_cpu_s_per_gb": done and done.costs, "loads": loads}
    (folder / "gguf.json").write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--types", default=",".join(ours.decoders()))
    parser.add_argument("--model", type=Path, help="a GGUF file that transformers can load, too")
    parser.add_argument("--loads", type=int, default=3, metavar="ROUNDS")
    parser.add_argument("--results", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    types = [name for name in args.types.split(",") if name]
    done = decoded(args.elements, args.rounds, types) if types else None
    loads = loaded(args.model, args.loads) if args.model else {}
    if loads:
        print("\n" + table(LOAD_HEAD, load_rows(loads)))
    goals = [*(done.missed if done else ()), *load_goals(loads)]
    print("\n".join(goals) or "all goals are met")
    if args.results:
        write(args.results, done, loads, goals)


if __name__ == "__main__":
    main()
