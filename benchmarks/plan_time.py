"""How long a large mixture of experts takes to be catalogued, planned and lowered, beside a walk over its files.

The checkpoint has the names and shapes of DeepSeek-V3: 90,427 tensors in 160 shards, for one rank of 8 (tensor
parallel, with an eighth of the experts). Only its headers are real: the files are sparse, and no data is read. The
walk opens each file with safetensors' own `safe_open` and asks every tensor for its dtype and shape. Both run in turn,
several times, in this process; medians and best times are printed, with seconds of the processor, which say more on a
busy machine; and again for about half the tensors, to show how time grows with size. The target (what the model
declares) is built before.

    python benchmarks/plan_time.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import struct
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the shapes of models live with the tests

from safetensors import safe_open

from helpers.model_shapes import DeepSeek
from helpers.model_targets import FUSED, deepseek_rank
from tensorferry.collector import collector_paused
from tensorferry.config import ReadOptions
from tensorferry.core.lower import lower
from tensorferry.core.planning import make_plan
from tensorferry.core.target import Target
from tensorferry.formats.opening import open_files

RANK, RANKS, SHARDS = 1, 8, 160
WIDTH = {"BF16": 2, "F8_E4M3": 1, "F32": 4}


def write_headers(folder: Path, model: DeepSeek, shards: int) -> int:
    """Write `shards` sparse files and their index; return how many tensors there are."""
    tensors = list(model.tensors())
    per = -(-len(tensors) // shards)
    index: dict[str, str] = {}
    for n in range(shards):
        name = f"model-{n + 1:05d}-of-{shards:06d}.safetensors"
        header, at = {}, 0
        for tensor, dtype, shape in tensors[n * per : (n + 1) * per]:
            size = prod(shape) * WIDTH[dtype]
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            index[tensor] = name
            at += size
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return len(tensors)


def walk(folder: Path) -> Mapping[str, float]:
    """What a loader does that asks the reference library for every tensor's dtype and shape."""
    start, busy = time.perf_counter(), time.process_time()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                part.get_dtype(), part.get_shape()
    return {"safe_open walk": time.perf_counter() - start, "safe_open walk cpu": time.process_time() - busy}


def ours(folder: Path, target: Target, found: dict[str, Any]) -> Mapping[str, float]:
    """Catalogue, plan and lower; what came out goes to `found`."""
    options = ReadOptions()
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for phase, run in _phases(folder, target, options, found):
        start, busy = time.perf_counter(), time.process_time()
        run()
        seconds[phase], cpu[phase] = time.perf_counter() - start, time.process_time() - busy
    found["opened"].close()
    seconds["all three"], cpu["all three"] = sum(seconds.values()), sum(cpu.values())
    return seconds | {f"{phase} cpu": taken for phase, taken in cpu.items()}


def _phases(
    folder: Path, target: Target, options: ReadOptions, found: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], None]]]:
    plan, schedule = collector_paused()(make_plan), collector_paused()(lower)  # as `tensorferry.api` does
    yield "catalogue", lambda: found.update(opened=open_files(folder))
    yield "plan", lambda: found.update(plan=plan(found["opened"].catalogue, target, FUSED))
    sizes = {"max_gap": options.max_gap, "max_read": options.max_read, "max_staging": options.max_staging}
    yield "lower", lambda: found.update(schedule=schedule(found["plan"], **sizes, waste=options.waste))


def measure(model: DeepSeek, shards: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = write_headers(folder, model, shards)
        start = time.perf_counter()
        target = deepseek_rank(model, RANK, RANKS)
        describing = time.perf_counter() - start
        seconds: dict[str, list[float]] = defaultdict(list)
        found: dict[str, Any] = {}
        for n in range(rounds):
            turns: list[Callable[[], Mapping[str, float]]] = [lambda: walk(folder), lambda: ours(folder, target, found)]
            for turn in turns if n % 2 else reversed(turns):
                found.clear()
                gc.collect()
                for what, taken in turn().items():
                    seconds[what].append(taken)
        if not found:
            ours(folder, target, found)
        report(tensors, shards, found, seconds, describing)


def report(
    tensors: int, shards: int, found: Mapping[str, Any], seconds: Mapping[str, list[float]], describing: float
) -> None:
    plan, schedule = found["plan"], found["schedule"]
    assert not plan.problems, plan.problems[:3]
    medians = {what: statistics.median(taken) for what, taken in seconds.items()}
    made = {
        "catalogue": f"{len(found['opened'].catalogue):,} entries",
        "plan": f"{len(plan.steps):,} steps, {len(plan.dropped):,} drops, {plan.bytes_needed / 2**30:.1f} GiB",
        "lower": f"{schedule.reads:,} reads in {len(schedule.batches):,} batches, "
        f"{schedule.bytes_read / plan.bytes_needed:.2f} bytes read for each needed",
        "all three": f"{medians['all three'] / medians['safe_open walk']:.1f} times the walk, "
        f"{medians['all three'] / tensors * 1e6:.0f} us for each tensor",
        "safe_open walk": "keys, dtype and shape of every tensor",
    }
    print(f"{tensors:,} tensors in {shards} shards, rank {RANK} of {RANKS} (target built in {describing:.2f} s):")
    print(f"  {'':<15}{'median':>8}{'best':>8}{'cpu':>8}")
    for what in ("catalogue", "plan", "lower", "all three", "safe_open walk"):
        best, busy = min(seconds[what]), medians[f"{what} cpu"]
        print(f"  {what:<15}{medians[what]:6.2f} s{best:6.2f} s{busy:6.2f} s   {made[what]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    measure(DeepSeek(layers=32), SHARDS // 2, rounds)
    measure(DeepSeek(), SHARDS, rounds)


if __name__ == "__main__":
    main()
