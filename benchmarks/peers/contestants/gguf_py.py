"""gguf-py: its reader and decoders in numpy, then a copy into the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.peers.contestant import Contestant

if TYPE_CHECKING:
    from benchmarks.peers.task import Task


def _load(task: Task) -> None:
    import torch
    from benchmarks.peers.checkpoints import gguf_tensors

    for name, values in gguf_tensors(task.folder, task.work.checkpoint, task.size):
        task.put(name, torch.from_numpy(values))


CONTESTANTS = (
    Contestant("gguf-py", _load, "GGUFReader, dequantize, copy_", ("q8_0", "q4_k"), imports=("gguf", "numpy")),
)
