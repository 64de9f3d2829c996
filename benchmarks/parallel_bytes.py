"""What one rank of several reads of a checkpoint, and how long it takes: tensorferry, slices, and whole tensors.

Writes a Llama-like checkpoint of 1 GiB and one with a mixture of experts, and lets a rank of four fill its part of the
decoder in examples/llama.py in three ways: by tensorferry; by safetensors' `get_slice`; and by reading every tensor
whole and cutting it, as loaders do that hand tensors to layers. Each way has a process of its own, cold (the file is
dropped from the page cache) and warm, the ways in turns; all end with the same values, compared by digest. Bytes are
those that the process fetched from the disk when cold; what tensorferry itself counted, for each byte that the plan
needs, stands beside.

    python benchmarks/parallel_bytes.py [--rounds 3] [--folder DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from page_cache import bring, forget
from safetensors import safe_open

import tensorferry
from tensorferry import ParallelConfig
from tensorferry.api import prepare
from tensorferry.formats.safetensors_write import SafetensorsWriter
from tensorferry.formats.writing import NewTensor
from tensorferry.numerics.torch_dtypes import dtype_of

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "llama.py"
LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 9,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
MOE = {
    **LLAMA, "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 1792, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2, "vocab_size": 8000,
}  # fmt: skip
CASES = {
    "llama, rank 1 of tp 4": (LLAMA, ParallelConfig(tp_size=4, tp_rank=1)),
    "llama, rank 1 of tp 2": (LLAMA, ParallelConfig(tp_size=2, tp_rank=1)),
    "moe, rank 1 of ep 4": (MOE, ParallelConfig(ep_size=4, ep_rank=1)),
    "moe, rank 1 of tp 4 and ep 4": (MOE, ParallelConfig(tp_size=4, tp_rank=1, ep_size=4, ep_rank=1)),
}
TIGHT = {"moe, rank 1 of ep 4"}
"""Cases without column slices of small tensors, which may be read with what lies between; see the cost rule."""
WAYS = ("tensorferry", "get_slice", "whole tensors")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the checkpoints, measure, and print a table; 1 where values differ, or too much is read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints; by default a temporary folder")
    parser.add_argument("--child", nargs=4, metavar=("CASE", "WAY", "FOLDER", "COLD"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measured(*options.child)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return compare(Path(folder), options.rounds)


def compare(folder: Path, rounds: int) -> int:
    """Run all cases, print a row for each way."""
    wrong = 0
    print(
        f"{'case':30} {'way':14} {'needed':>9} {'counted':>7} {'cold read':>10} {'over':>6} {'cold s':>7} {'warm s':>7}"
    )
    for case, (config, _) in CASES.items():
        written(folder / str(config["model_type"]), config)
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for cold in ("cold", "warm"):
                for way in WAYS:
                    runs[way].append(child(case, way, folder / str(config["model_type"]), cold))
        digests = {run["digest"] for some in runs.values() for run in some}
        wrong += len(digests) > 1
        for way, some in runs.items():
            cold_ones = [run for run in some if run["cold"] == "cold"]
            read = statistics.median(run["disk"] for run in cold_ones)
            seconds = [statistics.median(r["seconds"] for r in some if r["cold"] == c) for c in ("cold", "warm")]
            needed, own = some[0]["needed"], some[0]["counted"]
            wrong += case in TIGHT and own is not None and own > 1.02 * needed
            counted = "" if own is None else f"{own / needed:.3f}"
            print(
                f"{case:30} {way:14} {needed / 2**20:7.1f} M {counted:>7} {read / 2**20:8.1f} M {read / needed:6.3f}"
                f" {seconds[0]:7.3f} {seconds[1]:7.3f}",
                flush=True,
            )
    print(
        "all ways end with the same values, and plans of experts read no more than 1.02 times what they need"
        if not wrong
        else f"{wrong} times values differ, or plans of experts read too much"
    )
    return int(wrong > 0)


def child(case: str, way: str, folder: Path, cold: str) -> dict[str, Any]:
    """Return what a process of its own measures."""
    call = [sys.executable, __file__, "--child", case, way, str(folder), cold]
    found: dict[str, Any] = json.loads(subprocess.run(call, capture_output=True, text=True, check=True).stdout)
    return found


def written(folder: Path, config: dict[str, Any]) -> None:
    """Write a checkpoint with random bits of ordinary sizes, in shards, unless it is there."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True)
    example = runpy.run_path(str(EXAMPLE))
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        model = example["Llama"](config)
        torch.set_default_dtype(torch.float32)
    names = dict(pair for name, p in model.named_parameters() for pair in entries_of(name, p, model))
    bf16 = dtype_of(torch.bfloat16)
    tensors = {name: NewTensor(bf16, shape, chunks(shape, n)) for n, (name, shape) in enumerate(names.items())}
    SafetensorsWriter().write(folder, tensors, metadata={}, max_shard_size=512 << 20)
    (folder / "config.json").write_text(json.dumps(config))


def entries_of(name: str, parameter: torch.Tensor, model: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes that a Hugging Face checkpoint has for a parameter of the decoder."""
    full = name if name == "lm_head.weight" else f"model.{name}"
    slots = model.get_submodule(name.rpartition(".")[0])
    layout = slots.tensor_slots().get(name.rpartition(".")[2]) if hasattr(slots, "tensor_slots") else None
    if layout is None:
        return [(full, tuple(parameter.shape))]
    found = []
    kinds = {"w1": "w1", "w2": "w2", "w3": "w3"}
    for slot, where in layout.slots.items():
        entry = full
        if "." in slot:
            expert, kind = slot.split(".")
            entry = full.rpartition(".experts.")[0].replace(".mlp", ".block_sparse_moe")
            entry = f"{entry}.experts.{expert}.{kinds[kind]}.weight"
        elif slot:
            entry = full.replace("qkv_proj", f"{slot}_proj").replace("gate_up_proj", f"{slot}_proj")
        elif ".mlp.gate." in full:
            entry = full.replace(".mlp.", ".block_sparse_moe.")
        found.append((entry, where.logical))
    return found


def chunks(shape: tuple[int, ...], seed: int) -> Any:
    """Yield the bytes of a tensor of ordinary bfloat16 numbers, a row or so at a time."""
    generator = torch.Generator().manual_seed(seed)
    rows = shape[0]
    for at in range(0, rows, 1024):
        part = torch.rand((min(1024, rows - at), *shape[1:]), generator=generator, dtype=torch.float32)
        yield part.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def measured(case: str, way: str, folder: str, cold: str) -> dict[str, Any]:
    """Fill the rank's model in one way, and return what that took."""
    torch.set_num_threads(1)
    config, parallel = CASES[case]
    example = runpy.run_path(str(EXAMPLE))
    torch.set_default_dtype(torch.bfloat16)
    model = example["Llama"](config, parallel)  # its memory is there before: what is measured is the loading
    for parameter in model.parameters():
        parameter.data.zero_()
    checkpoint = tensorferry.open_checkpoint(folder)
    prepared = prepare(model, checkpoint, rules=model.weight_rules)
    prepared.plan.raise_for_problems()
    (forget if cold == "cold" else bring)(Path(folder).glob("*.safetensors"))
    before, began = disk_bytes(), time.perf_counter()
    report = LOADS[way](model, checkpoint, prepared, Path(folder))
    seconds, disk = time.perf_counter() - began, disk_bytes() - before
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    needed = prepared.plan.bytes_needed
    counted = None if report is None else report.bytes_read
    return {
        "seconds": seconds, "disk": disk, "needed": needed, "counted": counted, "digest": digest.hexdigest(),
        "cold": cold,
    }  # fmt: skip


def by_tensorferry(model: Any, checkpoint: Any, prepared: Any, folder: Path) -> Any:
    """Load as users do, planning included, and return the report."""
    return tensorferry.load(model, folder, rules=model.weight_rules)


def by_slices(model: Any, checkpoint: Any, prepared: Any, folder: Path) -> None:
    """Take from each tensor what the plan says, through safetensors."""
    _by_steps(model, checkpoint, prepared, folder, lambda file, name, box: file.get_slice(name)[box])


def by_whole_tensors(model: Any, checkpoint: Any, prepared: Any, folder: Path) -> None:
    """Read every tensor of every file, and cut out of it what the plan says."""
    wanted = {step.sources[0].entry.name for step in prepared.plan.steps if step.sources}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in set(file.keys()) - wanted:
                file.get_tensor(name).clone()  # handed to a layer that has no use for it
    _by_steps(model, checkpoint, prepared, folder, lambda file, name, box: file.get_tensor(name).clone()[box])


def _by_steps(model: Any, checkpoint: Any, prepared: Any, folder: Path, take: Callable[..., torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    files: dict[str, Any] = {}
    with torch.no_grad():
        for step in prepared.plan.steps:
            into = parameters[step.parameter].view(step.into.view)[step.into.box.slices]
            if not step.sources:
                into.fill_(step.fill)
                continue
            (source,) = step.sources
            path = source.entry.files[0]
            file = files.setdefault(path, safe_open(folder / path, "pt"))
            box = source.region.box.slices
            into.copy_(take(file, source.entry.name, box).reshape(into.shape))


LOADS = dict(zip(WAYS, (by_tensorferry, by_slices, by_whole_tensors), strict=True))


def disk_bytes() -> int:
    """Return what this process has caused to be fetched from a disk, in bytes."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


if __name__ == "__main__":
    sys.exit(main())
