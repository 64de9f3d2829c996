"""torch.distributed.checkpoint with its reader of Hugging Face checkpoints; a rank's part as DTensors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.peers.contestant import Contestant
from benchmarks.peers.contestants._fake_group import fake_mesh

if TYPE_CHECKING:
    from benchmarks.peers.task import Task

_IMPORTS = (
    "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.testing._internal.distributed.fake_pg",
    "safetensors.torch",
)  # fmt: skip


def _load(task: Task) -> None:
    dcp: Any = import_module("torch.distributed.checkpoint")

    reader = dcp.HuggingFaceStorageReader(str(task.folder), thread_count=4)
    dcp.load(_targets(task), storage_reader=reader, no_dist=True)


def _targets(task: Task) -> dict[str, Any]:
    targets: dict[str, Any] = {name: p.data for name, p in task.parameters.items()}
    if task.work.part != "tp":
        return targets
    import torch
    from torch.distributed.tensor import DTensor, Shard

    mesh = fake_mesh()
    for name, part in task.parts.items():
        if part is not None:
            rows, columns = task.shapes[name]
            targets[name] = DTensor.from_local(
                targets[name], mesh, [Shard(part[0])], run_check=False, shape=torch.Size((rows, columns)),
                stride=(columns, 1),
            )  # fmt: skip
    return targets


CONTESTANTS = (Contestant("torch DCP", _load, "dcp.load(HuggingFaceStorageReader(thread_count=4))", imports=_IMPORTS),)
