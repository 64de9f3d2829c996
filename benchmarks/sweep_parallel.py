"""Which causal language models of transformers are right when tensorferry divides them by the plan of their class.

Every class of MODEL_FOR_CAUSAL_LM_MAPPING that has a tensor- or expert-parallel plan is built tiny, saved, loaded
whole, and loaded by 2 (or more) processes that talk through gloo; their logits are compared with those of the whole
model, in float32. Prints `N of M classes with a plan are right`, what a rank read of each, and the reason of each miss.

    python benchmarks/sweep_parallel.py [--only LlamaForCausalLM …] [--tp 2] [--ep 1] [--timeout 120]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from sweep_transformers import Outcome, _words, classes, logits, save_tiny

import tensorferry
from tensorferry import ConfigError, ParallelConfig

CLOSE = 2e-5
"""Largest difference of logits, relative to the largest of them, that another order of sums may make."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep and print its account; 1 where a class with a plan is not right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="CLASS")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each class")
    options = parser.parse_args(arguments)
    outcomes = []
    for config_class, name in classes(options.only):
        outcome = tried(config_class, name, options.tp, options.ep, options.timeout)
        outcomes.append(outcome)
        if outcome.kind not in ("right", "no plan", "not built") or options.only:
            print(f"{outcome.kind}: {outcome.name}: {outcome.detail}", flush=True)
    counts = Counter(o.kind for o in outcomes)
    planned = len(outcomes) - counts["no plan"] - counts["not built"]
    print(
        f"{counts['right']} of {planned} classes with a plan are right at tp {options.tp}, ep {options.ep}; "
        f"{counts['no plan']} more have none, and {counts['not built']} do not build from a tiny configuration"
    )
    return int(counts["right"] < planned)


def tried(config_class: type, name: str, tp: int, ep: int, timeout: float) -> Outcome:
    """Return the outcome of a class, tried by as many forks of this process as there are ranks."""
    context = multiprocessing.get_context("fork")
    ranks, ends, processes = max(tp, ep), [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(theirs, config_class, name, tp, ep, rank, Path(folder)))
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return Outcome(name, *_gathered(ends, timeout))
        finally:
            for process in processes:
                process.kill()
                process.join()


def _gathered(ends: list[Any], timeout: float) -> tuple[str, str]:
    """Return what the ranks found: the first that is not right, else what rank 0 says."""
    until, open_ends, said = time.monotonic() + timeout, list(ends), {}
    while open_ends:
        ready = wait(open_ends, max(0.0, until - time.monotonic()))
        if not ready:
            return "failed", f"no answer within {timeout:.0f} seconds"
        for end in ready:
            open_ends.remove(end)
            try:
                said[ends.index(end)] = end.recv()  # type: ignore[union-attr]
            except EOFError:
                return "failed", "a rank ended without an answer"
            if said[ends.index(end)][0] != "right":
                found: tuple[str, str] = said[ends.index(end)]
                return found
    first: tuple[str, str] = said[0]
    return first


def _answer(out: Connection, config_class: type, name: str, tp: int, ep: int, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=max(tp, ep), rank=rank)
        out.send(attempt(config_class, getattr(transformers, name), tp, ep, rank, folder / "model"))


def attempt(config_class: type, kind: type, tp: int, ep: int, rank: int, folder: Path) -> tuple[str, str]:
    """Return kind and detail of the outcome of one class on one rank."""
    parallel = ParallelConfig(tp_size=tp, tp_rank=rank if tp > 1 else 0, ep_size=ep, ep_rank=rank * ep // max(tp, ep))
    if rank == 0:
        try:
            save_tiny(config_class, kind, "float32", folder)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
            return "not built", _words(error)
    dist.barrier()
    try:
        whole, read = tensorferry.load_model(folder, auto_class=kind, return_report=True)
        expected = logits(whole)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        return "not built", _words(error)
    if isinstance(expected, str):
        return "not built", expected
    try:
        ours, report = tensorferry.load_model(folder, auto_class=kind, parallel=parallel, return_report=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        none = isinstance(error, ConfigError) and "-parallel plan in this version" in str(error)
        return ("no plan", "") if none else ("failed", _words(error))
    made = logits(ours)
    if isinstance(made, str):
        return "failed", made
    off = float((made - expected).abs().max() / expected.abs().max())
    share = report.bytes_needed / read.bytes_needed
    return ("right" if off <= CLOSE else "differs"), f"logits by {off:.1e}, {share:.0%} of the bytes"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    began = time.perf_counter()
    code = main()
    print(f"in {time.perf_counter() - began:.0f} s, transformers {transformers.__version__}, torch {torch.__version__}")
    sys.exit(code)
