"""torch.load of .bin files, mapped and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.peers.contestant import Contestant

if TYPE_CHECKING:
    from benchmarks.peers.task import Task


def _load(*, mmap: bool, own: bool = False) -> Callable[[Task], None]:
    def load(task: Task) -> None:
        import torch

        take = task.give if own else task.put
        for path in task.files:
            for name, tensor in torch.load(path, map_location="cpu", weights_only=True, mmap=mmap).items():
                take(name, tensor)

    return load


CONTESTANTS = (
    Contestant("torch.load mmap", _load(mmap=True), "torch.load(mmap=True), copy_", ("bin",)),
    Contestant("torch.load", _load(mmap=False), "torch.load(mmap=False), copy_", ("bin",)),
    Contestant(
        "torch.load, own memory", _load(mmap=False, own=True), "torch.load(mmap=False)", ("bin",), memory="own"
    ),
)  # fmt: skip
