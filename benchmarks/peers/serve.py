"""Measured loads, each in a process of its own, forked of one that has imported everything: ``serve MODULE...``.

Reads jobs as lines of JSON from standard input; for each, writes the process's number and then what was measured.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.peers.contestant import Contestant, all_contestants
from benchmarks.peers.machine import cached_bytes, counts, reset_peak, settle
from benchmarks.peers.task import Task, warm_up
from benchmarks.peers.works import WORKS, bytes_of

__all__ = ["measured"]


def measured(contestant: Contestant, job: dict[str, Any]) -> dict[str, Any]:
    """Do one load and return its counts; times are of the monotonic clock."""
    os.environ.update(contestant.settings)
    root, work, size = Path(job["root"]), WORKS[job["work"]], job["size"]
    family = contestant.family or work.family
    warm_up(contestant, root, work.name, family)
    gc.collect()
    task = Task(root, work, size, family, own=contestant.memory == "own" or contestant.limit)
    if contestant.prepare:
        contestant.prepare(task)
    settle(task.files, job["cache"], drop=job["drop"])
    gc.collect()
    reset_peak()
    before, began = counts(), time.monotonic()
    contestant.load(task)
    ended, after = time.monotonic(), counts()
    cached = sum(map(cached_bytes, task.files))
    if not contestant.limit:
        task.check()
    memory = {"anonymous_before": before.anonymous, "anonymous_after": after.anonymous, "peak": after.peak}
    times = {"seconds": ended - began, "began": began, "ended": ended, "cpu": after.cpu - before.cpu}
    reads = {"disk": after.disk - before.disk, "major_faults": after.major_faults - before.major_faults}
    return {"needed": bytes_of(work, size), **times, **reads, **memory, "cached": cached}


def _in_child(contestant: Contestant, job: dict[str, Any], out: int) -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is not for the one who reads results
        told = measured(contestant, job)
    except BaseException as error:  # noqa: BLE001 - it is told to the one who asked
        told = {"error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc()[-3000:]}
    with os.fdopen(out, "w") as file:
        file.write(json.dumps(told))
    os._exit(0)  # what a forked library would do at its end is not what is measured


def main(imports: list[str]) -> None:
    """Import, and serve until standard input ends."""
    missing = {}
    for module in imports:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - whatever a library raises, it cannot be used
            missing[module] = f"{type(error).__name__}: {error}"[:200]
    contestants = all_contestants()
    gc.collect()
    gc.freeze()
    _tell({"missing": missing})
    for line in sys.stdin:
        job = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _in_child(contestants[job["contestant"]], job, writer)
        os.close(writer)
        _tell({"pid": child})
        with os.fdopen(reader) as file:
            told = file.read()
        _, status = os.waitpid(child, 0)
        _tell(json.loads(told) if told else {"error": f"its process ended with status {status}"})


def _tell(what: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        _OUT.write(json.dumps(what) + "\n")
        _OUT.flush()


if __name__ == "__main__":
    _OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.argv[1:])
