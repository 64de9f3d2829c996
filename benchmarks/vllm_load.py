"""How long vLLM takes from the start of its loader to weights that are there, by load format, and what each rank reads.

A random Llama of the size asked for is written, with few layers, and filled on each rank by vLLM's own models: ours
(``--load-format tensorferry``), vLLM's lazy, prefetch and multi-thread ways, and Run:ai's streamer where it is
installed. In the environment that ``trace_vllm.py`` says how to make, about 40 minutes for 3 GiB and four rounds::

    vllm/bin/python benchmarks/vllm_load.py --gib 3 --page benchmarks/results/vllm.md [--size 1 2] [--folder /fast/disk]

Each load is a start: fresh processes build the model, as vLLM does, whose parameters nobody has touched then, load it
once, and end. Ways take turns, each round begins with another one, and all must end with the same bytes on each rank.

*Cold*: the files are dropped from the page cache (``posix_fadvise``) before the processes start, some ten seconds
before they load. *Cold, page cache just emptied*: it has held the files until the moment before the load. That matters
on virtual machines, which give memory that is free back to their hosts (free page reporting): what the page cache takes
comes slowly then, where it comes quickly if it has just been freed, as on a machine without a host. *Warm*: the page
cache has the files. *Apart*: each rank has a copy of the checkpoint of its own, as ranks do on several machines, or
whose storage keeps nothing for the next: the disk gives each what it asks for; else ranks find in the page cache what
others have read.

A run takes long. With ``--records FILE`` each load is written there as it ends, and what is there is not done again.

Seconds are those of the rank that takes longest, until its weights are there. *Until processed*: with what vLLM makes
of them then (``process_weights_after_loading``); what ours borrows of the page cache is copied at the end of that.
*read*: bytes that the processes had read from the disk (``read_bytes`` of /proc/self/io). *raw read*: no loader, each
rank just reads its share of the files past the page cache, each byte once, into memory that it uses again and again; no
way of loading from this disk is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Container, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from page_cache import bring, forget
from vllm_page import COLD, EMPTIED, OURS, RAW, WARM, page

from tensorferry.storage.blocks import block_of

WAYS: dict[str, dict[str, Any]] = {
    OURS: {"load_format": "tensorferry"},
    "lazy": {"load_format": "safetensors", "safetensors_load_strategy": "lazy"},
    "prefetch": {"load_format": "safetensors", "safetensors_load_strategy": "prefetch"},
    "multi-thread": {
        "load_format": "safetensors", "model_loader_extra_config": {"enable_multithread_load": True},
    },
    "runai_streamer": {"load_format": "runai_streamer"},
}  # fmt: skip
HIDDEN, INNER, VOCABULARY = 2048, 5632, 16384
LAYER = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)

_Key = tuple[int, bool, str, int, str]
"""A load: how many ranks, whether apart, the state of the page cache, the round, the way."""


def write_checkpoint(folder: Path, gib: float) -> int:
    """Write shards of random bytes as bfloat16, one for each layer, and return their size in bytes."""
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)  # so that a run that was broken off can be gone on with
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


def work(folder: Path, way: str) -> None:
    """Be one rank of a start: build the model, say so, load when a line comes, and say what that took."""
    if way == RAW:
        told_to()
        print(json.dumps({"way": way, **timed_raw(folder)}), flush=True)
        return
    import torch
    import trace_vllm
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    import tensorferry.compat.vllm

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    torch.accelerator.empty_cache = lambda: None  # vLLM's runner for the CPU does the same, where there is nothing else
    tensorferry.compat.vllm.register()
    model_config, config = trace_vllm.configs(folder)
    with set_current_vllm_config(config), trace_vllm.parallel_groups():
        model = initialize_model(vllm_config=config, model_config=model_config)
        told_to()
        print(json.dumps({"way": way, **timed(model, config, model_config, way)}), flush=True)


def told_to() -> None:
    """Say that this rank is ready, and wait for the others; end where nobody waits for it any more."""
    print(json.dumps({"ready": True}), flush=True)
    if not sys.stdin.readline():
        raise SystemExit(1)


def timed(model: Any, config: Any, model_config: Any, way: str) -> dict[str, Any]:
    """Load, and return what that took, with a digest of what is there then.

    ready: with what vLLM makes of the weights then, without the digest.
    """
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    told: dict[str, Any] = {}

    def load_weights(model: Any, model_config: Any) -> None:
        load(model, model_config)
        told.update(seconds=time.perf_counter() - begin, cpu=time.process_time() - spent)
        told.update(read=read_bytes() - before, digest=digest(model), looked=time.perf_counter())

    before, begin, spent = read_bytes(), time.perf_counter(), time.process_time()
    loader: Any = get_model_loader(LoadConfig(**options_of(way), use_tqdm_on_load=False))
    load, loader.load_weights = loader.load_weights, load_weights
    loader.create_model = lambda **_: model
    loader.load_model(vllm_config=config, model_config=model_config)
    ready = told["seconds"] + time.perf_counter() - told.pop("looked")
    report = getattr(loader, "report", None)
    return {
        **told, "ready": ready,
        "asked": None if report is None else report.bytes_read, "phases": {} if report is None else report.seconds,
    }  # fmt: skip


def timed_raw(folder: Path) -> dict[str, Any]:
    """Read this rank's share of the files past the page cache, with four threads, and return what that took."""
    rank, size, block = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 1 << 20
    files = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in sorted(folder.glob("*.safetensors"))]
    blocks = iter([(fd, at) for fd in files for at in range(0, os.fstat(fd).st_size, block)][rank::size])
    lock = threading.Lock()

    def reader() -> None:
        into = block_of(2 * block)[:block]  # on huge pages: nothing is faster to read into
        while True:
            with lock:
                fd, at = next(blocks, (None, 0))
            if fd is None:
                return
            done.append(os.preadv(fd, [into], at))

    done: list[int] = []
    before, begin, spent = read_bytes(), time.perf_counter(), time.process_time()
    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu, read = time.perf_counter() - begin, time.process_time() - spent, read_bytes() - before
    for fd in files:
        os.close(fd)
    assert sum(done) >= sum(file.stat().st_size for file in folder.glob("*.safetensors")) // size - len(files) * block
    return {"seconds": seconds, "cpu": cpu, "ready": seconds, "read": read, "digest": 0, "asked": read, "phases": {}}


def digest(model: Any) -> int:
    import torch

    parts = (p.detach().view(torch.int16).sum(dtype=torch.int64) for p in model.parameters())
    return sum((n + 1) * int(part) for n, part in enumerate(parts))


def options_of(way: str) -> dict[str, Any]:
    """Return vLLM's options for a way by its name, or for ours with the extra options that are given as JSON."""
    if way.startswith("{"):
        return {"load_format": "tensorferry", "model_loader_extra_config": json.loads(way)}
    return WAYS[way]


def read_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


class Start:
    """The ranks of one start, each a process that builds the model and loads it once in a `way`."""

    def __init__(self, folders: Sequence[Path], size: int, way: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = os.environ | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_DIST_IDENT": f"load{port}", "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 closed with the ranks
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank-of", way, "--folder", str(folders[r % len(folders)])],
                text=True, stderr=self._log, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=common | {"RANK": str(r), "LOCAL_RANK": str(r)},
            )
            for r in range(size)
        ]  # fmt: skip
        self._answers("ready")

    def load(self) -> list[dict[str, Any]]:
        """Have all ranks load, return what each of them says, and wait for their end."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.close()
        said = self._answers("way")
        for rank in self._ranks:
            rank.wait(120)
        self._log.close()
        return said

    def _answers(self, key: str) -> list[dict[str, Any]]:
        found = []
        for rank in self._ranks:
            assert rank.stdout is not None
            for line in rank.stdout:
                if line.startswith(f'{{"{key}"'):
                    found.append(json.loads(line))
                    break
            else:
                self._log.seek(0)
                raise SystemExit(f"a rank ended; the end of what they wrote:\n{self._log.read()[-2000:]}")
        return found


def measure(
    folders: Sequence[Path], size: int, repeat: int, ways: Sequence[str], known: Container[_Key] = ()
) -> Iterator[dict[str, Any]]:
    """Yield a record of each load that is not `known`. Ranks with `folders` of their own are only measured cold."""
    apart = len(folders) > 1
    files = [file for folder in folders for file in folder.glob("*.safetensors")]
    for cache in (COLD,) if apart else (COLD, EMPTIED, WARM):
        for turn in range(repeat):
            first = turn % len(ways)
            for way in (*ways[first:], *ways[:first]):
                if (cache == WARM and way == RAW) or (size, apart, cache, turn, way) in known:
                    continue
                forget(files)
                start = Start(folders, size, way)
                if cache != COLD:
                    bring(files)
                if cache != WARM:
                    forget(files)
                ranks = start.load()
                yield {
                    "size": size, "apart": apart, "cache": cache, "turn": turn, "way": way,
                    "seconds": max(rank["seconds"] for rank in ranks),
                    "ready": max(rank["ready"] for rank in ranks), "ranks": ranks,
                }  # fmt: skip


class Records:
    """The records of a run, in `file`, if there is one, as they come; those that are there already are taken over."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self.all: list[dict[str, Any]] = [json.loads(line) for line in lines]

    @property
    def known(self) -> set[_Key]:
        return {(r["size"], r["apart"], r["cache"], r["turn"], r["way"]) for r in self.all}

    def take(self, records: Iterator[dict[str, Any]]) -> None:
        """Keep `records`, and tell of each on standard error."""
        for record in records:
            self.all.append(record)
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            where = f"size {record['size']}{' apart' * record['apart']}, {record['cache']}, round {record['turn'] + 1}"
            print(f"{where}: {record['way']} {record['seconds']:.2f} s, {record['ready']:.2f} s", file=sys.stderr)


def refuse_different(records: Sequence[dict[str, Any]]) -> None:
    """Stop where ways ended with different values."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    for record in records:
        for rank, said in enumerate(record["ranks"]):
            if said["digest"]:
                found.setdefault((record["size"], rank), {})[said["digest"]] = record["way"]
    for (size, rank), digests in found.items():
        if len(digests) > 1:
            raise SystemExit(f"rank {rank} of {size} has other values after {' and '.join(digests.values())}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint (default 1)")
    parser.add_argument("--size", nargs="+", type=int, default=[1, 2], help="tensor-parallel ranks (default 1 and 2)")
    parser.add_argument("--repeat", type=int, default=3, help="how often each way runs (default 3)")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint (default: the temporary folder)")
    parser.add_argument("--ways", nargs="+", help="which to measure (default: all); JSON is ours with these options")
    parser.add_argument("--records", type=Path, help="where to keep what has been measured, to go on after a break")
    parser.add_argument("--page", type=Path, help="where to write the tables, as Markdown")
    parser.add_argument("--rank-of", metavar="WAY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        work(options.folder, options.rank_of)
        return 0
    if find_spec("vllm") is None:
        print("vLLM is not in this environment; trace_vllm.py says how to make one that has it")
        return 0
    known = [way for way in WAYS if way != "runai_streamer" or find_spec("runai_model_streamer")]
    ways = options.ways or [*known, RAW]
    records = Records(options.records)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        one = Path(name, "0")
        one.mkdir()
        total = write_checkpoint(one, options.gib)
        for size in options.size:
            records.take(measure([one], size, options.repeat, ways, records.known))
        size = max(options.size)
        if size > 1:
            copies = [one, *(Path(shutil.copytree(one, Path(name, str(rank)))) for rank in range(1, size))]
            records.take(measure(copies, size, options.repeat, ways, records.known))
    refuse_different(records.all)
    text = page(records.all, total)
    print(text)
    if options.page:
        options.page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
