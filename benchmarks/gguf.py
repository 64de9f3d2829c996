"""How fast the block types of GGUF decode: ours, compiled and in torch, beside gguf-py and libgguf, in one run.

Every type is decoded by all of them in turn, so that a busy machine slows all; the least CPU time of all rounds is
printed, of all threads, for a gigabyte of output. What comes out is compared first. The bytes are random, with scales
as a model has them; rows have 4096 elements. Destinations are made, and kernels compiled, before the clock starts.

Goals: four times as fast as gguf-py on every type, and not slower than libgguf on the K and the 4-bit types, in
float32, which is all that those two give; bfloat16 is ours alone (others need a second pass).

    python benchmarks/gguf.py [--elements 4194304] [--rounds 15] [--types Q4_K,Q6_K]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
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

Run = Callable[[], object]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--types", default=",".join(ours.decoders()))
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours._WORTH = {"cpu": 0}
    print(f"{'CPU seconds for 10^9 bytes of output':63}{'numba is faster than':>22}")
    print(f"{'':8}" + "".join(f"{c:>11}" for c in (*COLUMNS, "gguf-py", "libgguf")))
    failures = []
    for name in args.types.split(","):
        dtype = DTYPES[name]
        raw = blocks_of(dtype, args.elements)
        runs = runs_of(dtype, raw)
        check(dtype, raw, runs)
        least = measured(runs, args.rounds)
        cost = {c: s / args.elements / (2 if c == "numba bf16" else 4) * 1e9 for c, s in least.items()}
        print(row_of(name, cost), flush=True)
        failures += missed(name, cost)
    print("\n".join(failures) or "all goals are met")


if __name__ == "__main__":
    main()
