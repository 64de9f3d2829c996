"""Measure every contestant in turns, and write a table and a picture: ``python -m benchmarks.peers``, on Linux."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.contestant import Contestant, all_contestants
from benchmarks.peers.environments import ENVIRONMENTS, ROOT, Unavailable, python_of
from benchmarks.peers.machine import described
from benchmarks.peers.page import write_results
from benchmarks.peers.servers import Servers
from benchmarks.peers.works import SIZES, WORKS, bytes_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 where a contestant failed."""
    options = _options(arguments)
    if options.page:
        write_results(json.loads(options.page.read_text()), options.results)
        return 0
    pythons, skipped = _pythons(options)
    wanted = [c for c in all_contestants().values() if c.environment in pythons and _chosen(c, options)]
    jobs = [(w, c) for w, c in product(options.works, wanted) if w in c.works]
    _write_checkpoints(jobs, options, pythons["libraries"])
    with Servers(pythons, options.threads) as servers:
        jobs = [job for job in jobs if not _reason(servers, job[1], skipped)]
        records = list(_measured(servers, jobs, options))
    load = median(r["load"] for r in records) if records else 0.0
    about = {"size": options.size, "rounds": options.rounds, "threads": options.threads, "load": load}
    run = {
        "date": str(date.today()),
        "machine": described(),
        "dropped_caches": options.drop_caches,
        **about,
        "skipped": skipped,
    }
    run |= {"bytes": {work: bytes_of(WORKS[work], options.size) for work in options.works}, "records": records}
    write_results(run, options.results)
    return int(any("error" in r for r in records))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--size", choices=SIZES, default="large", help="of the checkpoints: 3 GiB, about 0.6 GiB, or a few MiB")
    add("--rounds", type=int, default=5)
    add("--works", type=lambda t: t.split(","), default=list(WORKS), help=f"of {','.join(WORKS)}")
    add("--caches", type=lambda t: t.split(","), default=["cold", "warm"], help="states of the page cache")
    add("--only", nargs="+", default=["*"], metavar="PATTERN", help="of the names of contestants")
    add("--limits", nargs="+", default=["*"], metavar="PATTERN", help="of the names of limits of the machine")
    add("--vllm", action="store_true", help="vLLM's iterators as well; its environment takes half a gigabyte")
    add("--cache", type=Path, default=ROOT / ".cache" / "peers", help="where checkpoints and environments are kept")
    add("--results", type=Path, default=ROOT / "benchmarks" / "results", help="the folder to write to")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch, for every contestant")
    add("--drop-caches", action="store_true", help="empty the page cache of the whole machine as well")
    add("--python", action="append", default=[], metavar="NAME=PATH", help="an interpreter to take for an environment")
    add("--page", type=Path, metavar="JSON", help="only write the table and the picture of a run again")
    options = parser.parse_args(arguments)
    if unknown := set(options.works) - WORKS.keys():
        parser.error(f"no such work: {', '.join(sorted(unknown))}")
    return options


def _pythons(options: argparse.Namespace) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the interpreter of each environment that there is, and of the others the reason."""
    found = {name: Path(path) for name, _, path in (given.partition("=") for given in options.python)}
    skipped: dict[str, str] = {}
    for name in ENVIRONMENTS.keys() - found.keys():
        if name == "vllm" and not options.vllm:
            skipped[name] = "asked for with --vllm"
            continue
        try:
            found[name] = python_of(name, options.cache)
        except Unavailable as error:
            skipped[name] = str(error)
    for name, why in skipped.items():
        print(f"skipped: {name}: {why}")
    if "libraries" not in found:
        sys.exit("without the environment of the libraries there are no checkpoints")
    return found, skipped


def _chosen(contestant: Contestant, options: argparse.Namespace) -> bool:
    patterns = options.limits if contestant.limit else options.only
    return any(fnmatch(contestant.name, pattern) for pattern in patterns)


def _write_checkpoints(jobs: Sequence[tuple[str, Contestant]], options: argparse.Namespace, python: Path) -> None:
    """Write what the jobs need and is not there yet, and the small ones for warming up."""
    for size, work in product(dict.fromkeys(("toy", options.size)), dict.fromkeys(w for w, _ in jobs)):
        family = WORKS[work].family
        families = {c.family or family for w, c in jobs if w == work} | (
            {family} if family == "gguf" else {"safetensors"}
        )
        call = [str(python), "-m", "benchmarks.peers.checkpoints", str(options.cache / "checkpoints"), size, work]
        subprocess.run([*call, *sorted(families)], check=True, cwd=ROOT)


def _reason(servers: Servers, contestant: Contestant, skipped: dict[str, str]) -> str:
    """Return why a contestant cannot run, and tell it once."""
    for module, why in servers.missing(contestant).items():
        if contestant.name not in skipped:
            skipped[contestant.name] = f"cannot import {module}: {why}"
            print(f"skipped: {contestant.name}: {skipped[contestant.name]}")
    return skipped.get(contestant.name, "")


def _measured(
    servers: Servers, jobs: Sequence[tuple[str, Contestant]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Do each work in rounds, in each of which every contestant has its turn; the first one is another every time."""
    failed: set[tuple[str, str]] = set()
    for work, number in product(options.works, range(options.rounds)):
        turns = [
            (cache, c)
            for cache in options.caches
            for w, c in jobs
            if w == work and cache in {*c.caches} & {*WORKS[work].caches}
        ]
        first = number * 7 % len(turns) if turns else 0
        for cache, contestant in turns[first:] + turns[:first]:
            if (work, contestant.name) in failed:
                continue
            try:
                record = _one(servers, contestant, work, cache, number, options)
            except KeyboardInterrupt:
                return  # what there is, is written
            if "error" in record:
                failed.add((work, contestant.name))
            yield record


def _one(
    servers: Servers, contestant: Contestant, work: str, cache: str, number: int, options: argparse.Namespace
) -> dict[str, Any]:
    job = {
        "work": work, "cache": cache, "size": options.size, "root": str(options.cache / "checkpoints"),
        "drop": options.drop_caches,
    }  # fmt: skip
    told = servers.measure(contestant, job)
    about = {"work": work, "cache": cache, "contestant": contestant.name, "round": number, "load": os.getloadavg()[0]}
    if "error" in told:
        print(f"{work:7} {cache:4} {contestant.name:36} FAILED: {told['error']}", told.pop("trace", ""), flush=True)
    else:
        print(
            f"{work:7} {cache:4} {contestant.name:36} {told['seconds']:7.3f} s {told['cpu']:7.3f} CPU s"
            f" {told['disk'] / 2**20:8.0f} MiB read {told['anonymous'] / 2**20:8.0f} MiB anonymous",
            flush=True,
        )
    return {**about, **{k: round(v, 4) if isinstance(v, float) else v for k, v in told.items()}}


if __name__ == "__main__":
    sys.exit(main())
