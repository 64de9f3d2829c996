"""How fast the block types of GGUF decode on a GPU: by kernels, by torch there, and on the CPU with the numbers sent.

For the first two, blocks lie on the device already, so that decoding is measured alone; "upload" is sending them. The
third decodes on the CPU, by numba where it is, and sends bfloat16. Printed is output, in 10^9 bytes of bfloat16 a
second, the best of all rounds; kernels are compiled before. What comes out is compared first, bit for bit.

Without a CUDA device it says so and measures nothing.

    python benchmarks/gpu_gguf.py [--elements 67108864] [--rounds 5] [--types Q4_K,Q6_K]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from tensorferry.core.dtypes import DTYPES, DType
from tensorferry.numerics import dequantize as ours

COLUMNS = ("kernel", "torch", "CPU, sent", "upload")
ROW = 4096

Run = Callable[[], object]


def blocks_of(dtype: DType, elements: int) -> torch.Tensor:
    raw = np.random.default_rng(0).integers(0, 256, (elements // dtype.block, dtype.block_bytes), dtype=np.uint8)
    return torch.from_numpy(raw.reshape(-1, ROW // dtype.block * dtype.block_bytes))


def runs_of(dtype: DType, here: torch.Tensor, out: torch.Tensor) -> dict[str, Run]:
    """Return what is measured, by name; each leaves its numbers in `out`, on the device, but for upload."""
    there, decoded = here.to(out.device), torch.empty(out.shape, dtype=out.dtype)
    runs: dict[str, Run] = {}
    if (fill := ours.device_fill(out.device)) is not None:
        runs["kernel"] = lambda: fill(dtype, there, out)

    def by_torch() -> None:
        with mock.patch.object(ours, "_WORTH", {}):
            ours.decode_into(dtype, there, out)

    def on_the_cpu() -> None:
        ours.decode_into(dtype, here, decoded)
        out.copy_(decoded)

    return runs | {"torch": by_torch, "CPU, sent": on_the_cpu, "upload": lambda: there.copy_(here)}


def check(name: str, runs: dict[str, Run], out: torch.Tensor) -> None:
    """Raise SystemExit where two ways give other bits, NaN apart."""
    runs["CPU, sent"]()
    expected = out.clone()
    numbers = ~expected.isnan()
    for way in runs.keys() & {"kernel", "torch"}:
        out.zero_()
        runs[way]()
        same = out.isnan().equal(~numbers) and out.view(torch.int16)[numbers].equal(expected.view(torch.int16)[numbers])
        if not same:
            raise SystemExit(f"{name}: {way} gives other numbers than the CPU")


def seconds(run: Run) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--types", default=",".join(ours.decoders()))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was measured")
        return
    ours._WORTH = {"cpu": 0, "cuda": 0}
    out = torch.empty(args.elements // ROW, ROW, dtype=torch.bfloat16, device="cuda")
    print(f"{torch.cuda.get_device_name()}: 10^9 bytes of bfloat16 a second")
    print(f"{'':8}" + "".join(f"{c:>12}" for c in COLUMNS))
    for name in args.types.split(","):
        runs = runs_of(DTYPES[name], blocks_of(DTYPES[name], args.elements), out)
        check(name, runs, out)
        best = {way: min(seconds(run) for _ in range(args.rounds)) for way, run in runs.items()}
        cells = [f"{out.nbytes / best[c] / 1e9:12.1f}" if c in best else f"{'-':>12}" for c in COLUMNS]
        print(f"{name:8}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
