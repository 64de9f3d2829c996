"""How fast weights come from a disk into the memory of a GPU: cold and warm, beside other libraries and the limits.

Every contestant fills the same module, which has its memory on the device already, from the same safetensors files;
what it filled is compared with the files, bit by bit, once. Rounds go A B C A B C; printed are medians, in 10^9 bytes a
second. "pinned copy" is the limit of the way to the device, "disk" that of the files read past the page cache, if that
can be had. Cold: the page cache is told to forget the files. Libraries that are not installed are left out.

Without a CUDA device it says so in one line and measures nothing.

    python benchmarks/gpu.py [--folder PATH] [--gib 8] [--shards 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from page_cache import bring, forget
from torch import nn

import tensorferry
from tensorferry import ReadOptions

Fill = Callable[[nn.Module, list[Path]], object]
WIDTH = 4096  # of the matrices that are made up: 32 MiB of bfloat16 each
MIB = 1 << 20


def made_up(folder: Path, gib: float, shards: int) -> list[Path]:
    """Write matrices, and a vector after each so that offsets are odd, as safetensors files."""
    from safetensors.torch import save_file

    count = max(1, round(gib * (1 << 30) / (WIDTH * WIDTH * 2) / shards))
    block = torch.randint(
        -(1 << 15), 1 << 15, (WIDTH, WIDTH), generator=torch.Generator().manual_seed(0), dtype=torch.int16
    )
    for shard in range(shards):
        tensors = {}
        for i in range(count):
            bits = block ^ (shard * count + i)
            tensors[f"{shard}.{i}.matrix"] = bits.view(torch.bfloat16)
            tensors[f"{shard}.{i}.vector"] = bits[0, : 64 + i].clone().view(torch.bfloat16)
        save_file(tensors, folder / f"model-{shard + 1:05}-of-{shards:05}.safetensors")
    return sorted(folder.glob("*.safetensors"))


def module_of(folder: Path) -> nn.Module:
    """Return a module with a parameter on the device for every tensor, in nested modules as its name says."""
    root = nn.Module()
    with tensorferry.open_checkpoint(folder) as checkpoint:
        for name, entry in checkpoint.catalogue.items():
            holder = root
            *path, leaf = name.split(".")
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            kind = checkpoint.read(name).dtype if entry.nbytes < MIB else torch.bfloat16
            holder.register_parameter(leaf, nn.Parameter(torch.empty(entry.shape, dtype=kind, device="cuda"), False))
    return root


def ours(**options: object) -> Fill:
    reading = ReadOptions(**options)  # type: ignore[arg-type]
    return lambda module, files: tensorferry.load(module, files[0].parent, options=reading)


def copied(tensors: Callable[[list[Path]], Iterator[tuple[str, torch.Tensor]]]) -> Fill:
    """Fill by a library that yields tensors, of its own memory on the device or elsewhere."""

    def fill(module: nn.Module, files: list[Path]) -> None:
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors(files):
                parameters[name].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    return fill


def by_safetensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt", device="cuda") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - no mapping


def by_fastsafetensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from fastsafetensors import ParallelLoader, SingleGroup

    loader = ParallelLoader(
        SingleGroup(), list(map(str, files)), queue_size=0, use_tqdm_on_load=False, device="cuda:0", nogds=True
    )
    try:
        yield from loader.iterate_weights()
    finally:
        loader.close()


def by_instanttensor(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    import instanttensor

    with instanttensor.safe_open(list(map(str, files)), framework="pt", device=0) as file:
        yield from file.tensors()


def by_runai(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(map(str, files)))
        yield from streamer.get_tensors()


def contestants() -> dict[str, Fill]:
    """Return what is installed, ours first."""
    found = {"tensorferry": ours(), "tensorferry, not pinned": ours(pinned=False)}
    if find_spec("kvikio") is not None:
        found["tensorferry, by the GPU"] = ours(gpu_direct="always")
    others = {"safetensors": by_safetensors, "fastsafetensors": by_fastsafetensors, "instanttensor": by_instanttensor}
    libraries = {**others, "runai_model_streamer": by_runai}
    return found | {name: copied(way) for name, way in libraries.items() if find_spec(name) is not None}


def seconds(act: Callable[[], object]) -> float:
    return timed(act)[0]


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that it takes, and those that the CPUs work for it."""
    torch.cuda.synchronize()
    began, worked = time.perf_counter(), time.process_time()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - began, time.process_time() - worked


def bits_of(files: list[Path]) -> dict[str, torch.Tensor]:
    """Return the bytes of every tensor, on the device, as a plain read of the files finds them."""
    with tensorferry.open_checkpoint(files[0].parent) as checkpoint:
        return {name: raw(tensor).to("cuda") for name, tensor in checkpoint.tensors()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def works(name: str, fill: Fill, module: nn.Module, files: list[Path], bits: dict[str, torch.Tensor]) -> bool:
    """Fill once and compare; say what is wrong, if anything is."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    try:
        fill(module, files)
    except Exception as error:  # noqa: BLE001 - of other libraries, on a machine that nobody has seen
        print(f"{name:26} fails: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}")
        return False
    wrong = [name for name, parameter in module.named_parameters() if not torch.equal(raw(parameter), bits[name])]
    if wrong:
        print(f"{name:26} gives other bits in {len(wrong)} tensors, such as {wrong[0]}")
    return not wrong


def limits(files: list[Path]) -> dict[str, float]:
    """Return 10^9 bytes a second of a copy from pinned memory, and of the files into memory of the CPU."""
    here = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device="cuda")
    there.copy_(here)
    copy = min(seconds(lambda: there.copy_(here, non_blocking=True)) for _ in range(5))
    size = sum(path.stat().st_size for path in files)
    forget(files)
    way = ReadOptions(direct="auto", keep_cache=False)
    with tensorferry.open_checkpoint(files[0].parent, options=way) as checkpoint:
        disk = seconds(lambda: sum(1 for _ in checkpoint.tensors()))
    return {"pinned copy": here.nbytes / copy / 1e9, "disk to memory of the CPU": size / disk / 1e9}


def measure(files: list[Path], rounds: int) -> None:
    module, size, bits = module_of(files[0].parent), sum(path.stat().st_size for path in files), bits_of(files)
    for name, speed in limits(files).items():
        print(f"{name:26} {speed:8.2f}", flush=True)
    ready = {name: fill for name, fill in contestants().items() if works(name, fill, module, files, bits)}
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, fill in ready.items():
            forget(files)
            times.setdefault((name, "cold"), []).append(timed(lambda fill=fill: fill(module, files)))  # type: ignore[misc]
            bring(files)
            times.setdefault((name, "warm"), []).append(timed(lambda fill=fill: fill(module, files)))  # type: ignore[misc]
    print(f"{'':26} {'cold':>8} {'warm':>8}   CPU-seconds, cold and warm")
    for name in ready:
        cold, warm = (size / statistics.median(s for s, _ in times[name, state]) / 1e9 for state in ("cold", "warm"))
        busy = (f"{statistics.median(w for _, w in times[name, state]):8.2f}" for state in ("cold", "warm"))
        print(f"{name:26} {cold:8.2f} {warm:8.2f}   {' '.join(busy)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="safetensors files to load instead of made up ones")
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was measured")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: 10^9 bytes a second")
    if args.folder is not None:
        measure(sorted(args.folder.glob("*.safetensors")), args.rounds)
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        measure(made_up(Path(folder), args.gib, args.shards), args.rounds)


if __name__ == "__main__":
    main()
