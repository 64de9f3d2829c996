"""What it is worth that cached bytes, which would be staged, are copied under a lease from where they lie.

Parts of a made-up checkpoint in the page cache are loaded into memory that is in use, in turns with leases and without.
Printed are medians, in seconds of the processor and in seconds, and how many bytes were lent.

    python benchmarks/leases.py [--folder PATH] [--gib 1] [--rounds 9] [--threads 1 2]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from page_cache import bring, forget
from torch import nn

import tensorferry
from tensorferry.core.boxes import Box, Region
from tensorferry.core.target import Slot
from tensorferry.storage.local import LocalStorage

MIB = 1 << 20
FILES = 4
WORKS = {
    "2 KiB of 4": (2048, 0.5, torch.bfloat16), "11 KiB of 22": (11264, 0.5, torch.bfloat16),
    "512 B of 4 KiB": (2048, 0.125, torch.bfloat16), "cast to float32": (2048, 1.0, torch.float32),
}  # fmt: skip
"""Elements of a row, which part of it is wanted, and as what."""


class Columns(nn.ParameterDict):
    """Some columns of each matrix of a checkpoint."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], part: float, dtype: torch.dtype) -> None:
        kept = {name: (rows, round(columns * part)) for name, (rows, columns) in shapes.items()}
        super().__init__({n: nn.Parameter(torch.zeros(shape, dtype=dtype), False) for n, shape in kept.items()})
        self._slots = {
            name: {"": Slot(Region.whole(kept[name]), shape, Region(shape, Box((0, 0), kept[name])))}
            for name, shape in shapes.items()
        }

    def tensor_slots(self) -> Mapping[str, Mapping[str, Slot]]:
        """Return where in the checkpoint's matrices the parameters lie."""
        return self._slots


def written(folder: Path, columns: int, gib: float) -> dict[str, tuple[int, int]]:
    """Write files of matrices of some 16 MiB, and return their shapes."""
    from safetensors.torch import save_file

    shape, each = (8 * MIB // columns, columns), max(1, round(gib * 64 / FILES))
    block = torch.randn(shape, dtype=torch.bfloat16)
    for file in range(FILES):
        tensors = {f"{file}_{n}": block + n for n in range(each)}
        save_file(tensors, folder / f"model-{file + 1:05}-of-{FILES:05}.safetensors")
    forget(folder.glob("*.safetensors"))
    bring(folder.glob("*.safetensors"))  # pages that were read lie together otherwise than pages that were written
    return dict.fromkeys((f"{file}_{n}" for file in range(FILES) for n in range(each)), shape)


@contextmanager
def without_leases() -> Iterator[None]:
    """Have nothing lent."""

    @contextmanager
    def nothing(*asked: object) -> Iterator[None]:
        yield None

    before: Callable[..., object] = LocalStorage.lend
    setattr(LocalStorage, "lend", nothing)  # noqa: B010 - typed otherwise
    try:
        yield
    finally:
        setattr(LocalStorage, "lend", before)  # noqa: B010


def measure(what: str, folder: Path, model: Columns, threads: int, rounds: int) -> None:
    found, lent = defaultdict(list), {}
    options = tensorferry.ReadOptions(threads=threads)
    for number in range(rounds + 1):
        for way in ("read", "leased"):
            began, worked = time.perf_counter(), time.process_time()
            if way == "leased":
                report = tensorferry.load(model, folder, options=options)
            else:
                with without_leases():
                    report = tensorferry.load(model, folder, options=options)
            spent = time.process_time() - worked, time.perf_counter() - began
            found[way] += [spent] if number else []
            lent[way] = report.ways.get("cached: leased", 0)
    for way, times in found.items():
        busy, wall = (statistics.median(t[i] for t in times) for i in (0, 1))
        ratio = busy / statistics.median(t[0] for t in found["read"])
        print(f"{what:16} {threads:7} {way:7} {busy:7.3f} {ratio:7.2f} {wall:7.3f} {lent[way] // MIB:10}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where files are made: on the disk to measure")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':16} {'threads':>7} {'':7} {'CPU s':>7} {'':7} {'s':>7} {'lent, MiB':>10}")
    for what, (columns, part, dtype) in WORKS.items():
        with tempfile.TemporaryDirectory(dir=args.folder) as made:
            shapes = written(Path(made), columns, args.gib)
            model = Columns(shapes, part, dtype)
            for threads in args.threads:
                measure(what, Path(made), model, threads, args.rounds)


if __name__ == "__main__":
    main()
