"""Processes that are ranks of one group, talk through gloo, and run the functions that tests give them."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Fault", "Ranks"]


class Fault(NamedTuple):
    """What a rank raised: its class's name, its words, whether it says that the model was touched, and where it was."""

    kind: str
    words: str
    touched: bool
    trace: str


class Ranks:
    """`size` processes of a group. Close them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._ends: list[Any] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, Path(self._folder.name)), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def tried(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """Return what ``function(rank, size, *args)`` returned in every rank, or the `Fault` that it met.

        A rank that ended without an answer has the fault "Ended".
        function: at the top of a module. timeout: seconds for all ranks together; TimeoutError after it.
        """
        for end in self._ends:
            end.send((function, args))
        said: dict[int, Any] = {}
        while len(said) < self.size:
            ready: list[Any] = wait([end for rank, end in enumerate(self._ends) if rank not in said], timeout)
            if not ready:
                raise TimeoutError(f"ranks {sorted(set(range(self.size)) - said.keys())} did not answer")
            for end in ready:
                said[self._ends.index(end)] = _received(end)
        return [said[rank] for rank in range(self.size)]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what the function returned in every rank; AssertionError with the traceback of one that failed."""
        results = self.tried(function, *args)
        for rank, result in enumerate(results):
            if isinstance(result, Fault):
                raise AssertionError(f"rank {rank}: {result.trace}")
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _received(end: Any) -> Any:
    try:
        return end.recv()
    except EOFError:
        return Fault("Ended", "", False, "")


def _serve(calls: Connection, rank: int, size: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=size, rank=rank)
    while True:
        function, args = calls.recv()
        calls.send(_answer(function, rank, size, args))


def _answer(function: Callable[..., Any], rank: int, size: int, args: Sequence[Any]) -> Any:
    try:
        return function(rank, size, *args)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
        return Fault(type(error).__name__, str(error), getattr(error, "touched", False), traceback.format_exc())
