"""How long vLLM takes from the start of its loader to weights that are there, by load format, and what each rank reads.

A random Llama of the size asked for is written, with few layers, and filled on each rank by vLLM's own models: ours
(``--load-format tensorferry``), vLLM's lazy, prefetch and multi-thread ways, and Run:ai's streamer where it is
installed. In the environment that ``trace_vllm.py`` says how to make::

    vllm/bin/python benchmarks/vllm_load.py [--gib 1.5] [--size 1 2] [--repeat 3] [--folder /fast/disk]

Cold: the files are dropped from the page cache before (``posix_fadvise``). Seconds are those of the rank that takes
longest, the best of all repetitions. *read*: bytes that the rank's process had read from the disk (``read_bytes`` of
/proc/self/io, only sensible cold; ranks share the page cache, so what one has read another finds there).
*asked*: what a rank asks the kernel for, mapped pages and reads: for ours, of the report; for the others, whose loader
hands out every tensor, the whole checkpoint. Noisy machines want several repetitions. *ratio*: the best of the others'
seconds to ours.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "tensorferry": {"load_format": "tensorferry"},
    "lazy": {"load_format": "safetensors", "safetensors_load_strategy": "lazy"},
    "prefetch": {"load_format": "safetensors", "safetensors_load_strategy": "prefetch"},
    "multi-thread": {
        "load_format": "safetensors", "model_loader_extra_config": {"enable_multithread_load": True},
    },
    "runai_streamer": {"load_format": "runai_streamer"},
}  # fmt: skip
HIDDEN, INNER, VOCABULARY = 2048, 5632, 16384
LAYER = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)


def write_checkpoint(folder: Path, gib: float) -> int:
    """Write shards of random bytes as bfloat16, one for each layer, and return their size in bytes."""
    import torch
    import transformers
    from safetensors.torch import save_file

    ends = 2 * 2 * VOCABULARY * HIDDEN
    layers = max(1, round((gib * 2**30 - ends) / LAYER))
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=VOCABULARY, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(folder)
    where: dict[str, str] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in model.state_dict().items():
        layer = name.split(".")[2] if ".layers." in name else "ends"
        parts.setdefault(f"model-{layer}.safetensors", {})[name] = value.shape
    for file, shapes in parts.items():
        save_file({n: torch.randn(s, dtype=torch.bfloat16) for n, s in shapes.items()}, folder / file)
        where |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def drop_from_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def work(folder: Path) -> None:
    """Answer each way on standard input with a line: seconds, and bytes read."""
    import torch
    import trace_vllm
    from vllm.config import set_current_vllm_config

    import tensorferry.compat.vllm

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    tensorferry.compat.vllm.register()
    model_config, config = trace_vllm.configs(folder)
    with set_current_vllm_config(config), trace_vllm.parallel_groups():
        model = trace_vllm.initialize(model_config, config)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps({"way": line.strip(), **timed(model, model_config, line.strip())}), flush=True)


def timed(model: Any, model_config: Any, way: str) -> dict[str, Any]:
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    torch_sum = float(sum(p.detach().flatten()[0].float() for p in model.parameters()))
    before, begin = read_bytes(), time.perf_counter()
    loader: Any = get_model_loader(LoadConfig(**WAYS[way], use_tqdm_on_load=False))
    loader.load_weights(model, model_config)
    seconds = time.perf_counter() - begin
    report = getattr(loader, "report", None)
    return {
        "seconds": seconds, "read": read_bytes() - before, "sum": torch_sum,
        "asked": None if report is None else report.bytes_read,
    }  # fmt: skip


def read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


class Workers:
    """The ranks of one model, each a process that fills it again and again."""

    def __init__(self, folder: Path, size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = os.environ | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_DIST_IDENT": "load", "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        self._all = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", str(folder)], text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=common | {"RANK": str(r), "LOCAL_RANK": str(r)},
            )
            for r in range(size)
        ]  # fmt: skip
        self._answers("ready")

    def fill(self, way: str) -> list[dict[str, Any]]:
        for worker in self._all:
            assert worker.stdin is not None
            worker.stdin.write(way + "\n")
            worker.stdin.flush()
        return self._answers("way")

    def close(self) -> None:
        for worker in self._all:
            assert worker.stdin is not None
            worker.stdin.close()
            worker.wait(120)

    def _answers(self, key: str) -> list[dict[str, Any]]:
        found = []
        for worker in self._all:
            assert worker.stdout is not None
            for line in worker.stdout:
                if line.startswith(f'{{"{key}"'):
                    found.append(json.loads(line))
                    break
            else:
                raise SystemExit("a rank ended: run it with a worker's standard error to see why")
        return found


def measure(folder: Path, size: int, total: int, repeat: int) -> None:
    workers = Workers(folder, size)
    ways = [way for way in WAYS if way != "runai_streamer" or find_spec("runai_model_streamer")]
    try:
        for cold in (True, False):
            best: dict[str, float] = {}
            rows = {}
            for _ in range(repeat):
                for way in ways:
                    if cold:
                        drop_from_cache(folder)
                    ranks = workers.fill(way)
                    seconds = max(r["seconds"] for r in ranks)
                    if seconds < best.get(way, float("inf")):
                        best[way], rows[way] = seconds, ranks
            other = min(s for way, s in best.items() if way != "tensorferry")
            print(
                f"{size} rank(s), {'cold' if cold else 'warm'}: {other / best['tensorferry']:.2f} times the best other"
            )
            for way, ranks in rows.items():
                asked = max(r["asked"] or total for r in ranks)
                read = " + ".join(f"{r['read'] / 2**20:,.0f}" for r in ranks)
                print(
                    f"  {way:15}{best[way]:8.2f} s  asked {asked / 2**20:8,.0f} MiB a rank, read {read} MiB", flush=True
                )
    finally:
        workers.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.5, help="size of the checkpoint (default 1.5)")
    parser.add_argument("--size", nargs="+", type=int, default=[1, 2], help="tensor-parallel ranks (default 1 and 2)")
    parser.add_argument("--repeat", type=int, default=3, help="how often each way runs (default 3)")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint (default: the temporary folder)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return 0
    if find_spec("vllm") is None:
        print("vLLM is not in this environment; trace_vllm.py says how to make one that has it")
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        total = write_checkpoint(Path(name), options.gib)
        print(f"a Llama of {total / 2**30:.2f} GiB in bfloat16", flush=True)
        for size in options.size:
            measure(Path(name), size, total, options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
