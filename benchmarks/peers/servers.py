"""The processes that measured loads are forked of, one for each environment and set of imports, seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.contestant import Contestant
from benchmarks.peers.environments import ROOT
from benchmarks.peers.machine import MemorySampler

__all__ = ["Servers"]

_QUIET = {
    "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR", "RUNAI_STREAMER_LOG_LEVEL": "ERROR",
}  # fmt: skip


class Servers:
    """Starts servers when they are first needed, and ends them when the block ends.

    pythons: the interpreter of each environment. threads: of torch and of what asks OMP_NUM_THREADS, the same for all.
    """

    def __init__(self, pythons: Mapping[str, Path], threads: int) -> None:
        self._pythons, self._threads = pythons, threads
        self._running: dict[tuple[str, ...], _Server] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._running.values():
            server.close()

    def missing(self, contestant: Contestant) -> Mapping[str, str]:
        """Return the modules that the contestant's environment cannot import, and why."""
        return self._server(contestant).missing

    def measure(self, contestant: Contestant, job: Mapping[str, Any]) -> dict[str, Any]:
        """Have one load done and return what it took; `error` is in it where it failed."""
        return self._server(contestant).measure({**job, "contestant": contestant.name})

    def _server(self, contestant: Contestant) -> _Server:
        key = (contestant.environment, *contestant.imports)
        if key not in self._running:
            python = self._pythons[contestant.environment]
            self._running[key] = _Server(python, contestant.imports, self._threads)
        return self._running[key]


class _Server:
    def __init__(self, python: Path, imports: tuple[str, ...] | Any, threads: int) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        environment = {**os.environ, **_QUIET, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.peers.serve", *imports], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
        )  # fmt: skip
        self.missing: Mapping[str, str] = self._answer()["missing"]

    def measure(self, job: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        sampler = MemorySampler(self._answer()["pid"])
        told = self._answer()
        peak = sampler.peak(told.pop("began", 0.0), told.pop("ended", 0.0))
        if "error" not in told:
            before, after = told.pop("anonymous_before"), told.pop("anonymous_after")
            told["anonymous"] = max(peak, after) - before
        return told

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._said.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise RuntimeError("a server ended: " + self._said.read().decode(errors="replace")[-2000:])
        answer: dict[str, Any] = json.loads(line)
        return answer
