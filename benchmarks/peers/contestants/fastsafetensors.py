"""fastsafetensors without GPUDirect Storage: direct reads by 16 threads into a buffer for each file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.peers.contestant import Contestant
from benchmarks.peers.works import RANK, RANKS

if TYPE_CHECKING:
    from benchmarks.peers.task import Task

_IMPORTS = ("fastsafetensors", "fastsafetensors.parallel_loader")


def _load(*, own: bool) -> Callable[[Task], None]:
    def load(task: Task) -> None:
        from fastsafetensors import SafeTensorsFileLoader

        loader = SafeTensorsFileLoader(None, "cpu", nogds=True)
        if task.work.part == "ep":
            from fastsafetensors.ep_slice import expert_parallel_filter

            loader.set_tensor_filter(expert_parallel_filter(task.config["num_local_experts"], RANKS, RANK))
        loader.add_filenames({0: task.files})
        buffer = loader.copy_files_to_device()
        take = task.give if own else task.put
        for name in loader.get_keys():
            take(name, buffer.get_tensor(name))
        if own:
            task.kept.append((loader, buffer))
        else:
            buffer.close()
            loader.close()

    return load


def _pipelined(task: Task) -> None:
    from fastsafetensors import SingleGroup
    from fastsafetensors.parallel_loader import ParallelLoader

    loader = ParallelLoader(
        pg=SingleGroup(), hf_weights_files=task.files, queue_size=0, use_tqdm_on_load=False, device="cpu", nogds=True
    )
    for name, tensor in loader.iterate_weights():
        task.put(name, tensor)
    loader.close()


CONTESTANTS = (
    Contestant("fastsafetensors", _load(own=False), "SafeTensorsFileLoader(nogds=True), copy_", imports=_IMPORTS),
    Contestant(
        "fastsafetensors, own memory", _load(own=True), "SafeTensorsFileLoader(nogds=True)", ("full", "moe", "many"),
        imports=_IMPORTS, memory="own",
    ),
    Contestant("fastsafetensors pipelined", _pipelined, "ParallelLoader, copy_", ("full", "reload"), imports=_IMPORTS),
)  # fmt: skip
