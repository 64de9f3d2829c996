"""accelerate: `load_checkpoint_in_model` into the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.contestant import Contestant

if TYPE_CHECKING:
    from benchmarks.peers.task import Task


def _load(task: Task) -> None:
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(task.module, str(task.folder), device_map=None)


CONTESTANTS = (
    Contestant(
        "accelerate",
        _load,
        "load_checkpoint_in_model",
        ("full", "reload", "moe", "many", "bin"),
        imports=("accelerate",),
    ),
)
