"""How near loads come to what the machine can do: the raw reads, the first touch of memory, and tensorferry's settings.

All run in turn in one process, several rounds, on one safetensors file that is made for it: cold (the page cache is
told to let go of the file) and warm. A limit reads the same bytes with plain ``preadv`` into memory that was made
before; tensorferry fills a model, into fresh memory (on meta) or again into what it has. Printed are medians of wall
time with the spread, of the processor's time, and ratios to the first limit of each table. On a machine that others use
the processor's time says more.

    python benchmarks/limits.py [--gib 1] [--rounds 5] [--threads 1,2,4,8] [--folder DIR]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from page_cache import bring, forget
from torch import nn

import tensorferry
from tensorferry import ReadOptions

MIB, PAGE = 1 << 20, mmap.PAGESIZE
WIDTH = 2048  # matrices of WIDTH × WIDTH bfloat16, 8 MiB each
CHUNK = 16 * MIB

Times = tuple[float, float]


@dataclass(frozen=True)
class Bench:
    """One file, and the ways of reading it."""

    path: Path
    begin: int
    nbytes: int

    def chill(self) -> None:
        """Have the page cache let go of the file."""
        forget([self.path])

    def warm(self) -> None:
        """Have all of the file in the page cache."""
        bring([self.path])

    def raw(self, threads: int, memory: mmap.mmap | None, *, direct: bool) -> None:
        """Read the file with preadv into `memory`, or into fresh memory."""
        into = memory or fresh(self.nbytes + 2 * PAGE)
        view, fd = memoryview(into), os.open(self.path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            in_threads(threads, self.nbytes, lambda at: os.preadv(fd, [view[at : at + CHUNK]], at))
        finally:
            os.close(fd)

    def ours(self, model: nn.Module, **options: object) -> tensorferry.Report:
        """Load the file."""
        return tensorferry.load(model, self.path, options=ReadOptions(**options))  # type: ignore[arg-type]


def fresh(nbytes: int) -> mmap.mmap:
    """Return memory that nobody has touched."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def in_threads(threads: int, nbytes: int, work: Callable[[int], object]) -> None:
    """Call `work` for each chunk, by so many threads."""
    positions, lock = iter(range(0, nbytes, CHUNK)), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                at = next(positions, None)
            if at is None:
                return
            work(at)

    started = [threading.Thread(target=run) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def touch(nbytes: int, threads: int, memory: mmap.mmap | None = None) -> None:
    """Write to each byte of fresh memory, or of `memory`."""
    into = memory or fresh(nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(into))
    in_threads(threads, nbytes, lambda at: ctypes.memset(address + at, 1, min(CHUNK, nbytes - at)))


def written(folder: Path, layers: int, begin: int) -> Bench:
    """Write a file whose data begins at `begin` modulo a page."""
    size = 2 * WIDTH * WIDTH
    entries = (f'"{n}":{{"dtype":"BF16","shape":[{WIDTH},{WIDTH}],"data_offsets":[{n * size},{n * size + size}]}}'
               for n in range(layers))  # fmt: skip
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * ((begin - 8 - len(text)) % PAGE)
    path = folder / f"begins-at-{begin}.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(layers):
            file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
    return Bench(path, 8 + len(text), layers * size)


def empty(layers: int) -> nn.ParameterDict:
    """Return a model without memory."""
    names = map(str, range(layers))
    return nn.ParameterDict(
        {n: nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="meta")) for n in names}
    )


def timed(work: Callable[[], object]) -> Times:
    """Return the seconds that passed, and those of the processor."""
    wall, processor = time.perf_counter(), time.process_time()
    kept = work()
    times = time.perf_counter() - wall, time.process_time() - processor
    del kept
    return times


def contestants(
    aligned: Bench, other: Bench, layers: int, threads: list[int]
) -> dict[str, dict[str, Callable[[], object]]]:
    """Return what is compared, by table, each table's limit first."""
    touched = fresh(aligned.nbytes + 2 * PAGE)
    touch(aligned.nbytes, 1, touched)
    live, most = empty(layers), max(threads)
    aligned.ours(live)

    def load(bench: Bench, **options: object) -> Callable[[], object]:
        def run() -> nn.Module:
            model = empty(layers)
            bench.ours(model, **options)
            return model

        return run

    cold: dict[str, Callable[[], object]] = {
        **{f"raw direct, touched memory, {n}": partial(aligned.raw, n, touched, direct=True) for n in threads},
        f"raw direct, fresh memory, {most}": lambda: aligned.raw(most, None, direct=True),
        f"raw buffered, fresh memory, {most}": lambda: aligned.raw(most, None, direct=False),
        "tensorferry": load(aligned),
        **{f"tensorferry, threads={n}": load(aligned, threads=n) for n in threads},
        "tensorferry, data begins at 8": load(other),
        "tensorferry, direct='never'": load(aligned, direct="never"),
        "tensorferry, huge_pages=True": load(aligned, huge_pages=True),
        "tensorferry, mapped=True": load(aligned, mapped=True),
    }
    warm: dict[str, Callable[[], object]] = {
        **{f"raw buffered, fresh memory, {n}": partial(aligned.raw, n, None, direct=False) for n in threads},
        f"first touch, {most}": lambda: touch(aligned.nbytes, most),
        "tensorferry": load(aligned),
        "tensorferry, direct='always'": load(aligned, direct="always"),
        "tensorferry, huge_pages=True": load(aligned, huge_pages=True),
        "tensorferry, mapped=True": load(aligned, mapped=True),
    }
    reload: dict[str, Callable[[], object]] = {
        f"raw buffered, touched memory, {most}": lambda: aligned.raw(most, touched, direct=False),
        "tensorferry": lambda: aligned.ours(live),
    }
    return {"cold": cold, "warm": warm, "warm, into touched memory": reload}


def measure(tables: dict[str, dict[str, Callable[[], object]]], benches: list[Bench], rounds: int) -> None:
    """Run all in turn and print medians."""
    found: dict[tuple[str, str], list[Times]] = {}
    for _, (table, rows) in itertools.product(range(rounds), tables.items()):
        for name, work in rows.items():
            for bench in benches:
                bench.chill() if table == "cold" else bench.warm()
            found.setdefault((table, name), []).append(timed(work))
    for table, rows in tables.items():
        limit = [statistics.median(t) for t in zip(*found[table, next(iter(rows))], strict=True)]
        print(f"\n{table:42} {'wall s':>7} {'spread':>13} {'CPU s':>6} {'× wall':>7} {'× CPU':>7}")
        for name in rows:
            walls, processors = zip(*found[table, name], strict=True)
            wall, processor = statistics.median(walls), statistics.median(processors)
            print(f"  {name:40} {wall:7.2f} {min(walls):6.2f}-{max(walls):<6.2f} {processor:6.2f} "
                  f"{wall / limit[0]:7.2f} {processor / max(limit[1], 0.01):7.2f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--folder", type=Path, help="where files are made; it should lie on the disk that is measured")
    given = parser.parse_args()
    torch.set_num_threads(1)
    layers = max(1, round(given.gib * (1 << 30) / (2 * WIDTH * WIDTH)))
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        benches = [written(Path(name), layers, begin) for begin in (0, 8)]
        measure(contestants(benches[0], benches[1], layers, given.threads), benches, given.rounds)


if __name__ == "__main__":
    main()
