"""vLLM's iterators over safetensors files; each tensor is copied by what its default weight loader does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from benchmarks.peers.contestant import Contestant
from benchmarks.peers.works import RANK, RANKS

if TYPE_CHECKING:
    from benchmarks.peers.task import Task

_MODULE = "vllm.model_executor.model_loader.weight_utils"


def _by(iterator: Callable[[Any, Task], Iterable[tuple[str, Any]]]) -> Callable[[Task], None]:
    def load(task: Task) -> None:
        from importlib import import_module

        for name, tensor in iterator(import_module(_MODULE), task):
            task.put(name, tensor)

    return load


def _strategy(strategy: str) -> Callable[[Any, Task], Iterable[tuple[str, Any]]]:
    def iterate(utilities: Any, task: Task) -> Iterable[tuple[str, Any]]:
        mine = None
        if task.work.part == "ep":
            each = task.config["num_local_experts"] // RANKS
            mine = set(range(RANK * each, (RANK + 1) * each))
        found: Iterable[tuple[str, Any]] = utilities.safetensors_weights_iterator(
            task.files, False, safetensors_load_strategy=strategy, local_expert_ids=mine
        )
        return found

    return iterate


def _several(utilities: Any, task: Task) -> Any:
    return utilities.multi_thread_safetensors_weights_iterator(task.files, False, max_workers=4)


def _pt(utilities: Any, task: Task) -> Any:
    return utilities.pt_weights_iterator(task.files, False)


def _contestant(name: str, iterator: Any, call: str, *works: str) -> Contestant:
    return Contestant(f"vLLM {name}", _by(iterator), f"{call}, copy_", works, environment="vllm", imports=(_MODULE,))


CONTESTANTS = (
    _contestant("lazy", _strategy("lazy"), "safetensors_weights_iterator", "full", "reload", "tp", "moe", "ep", "many"),
    _contestant("prefetch", _strategy("prefetch"), 'safetensors_weights_iterator("prefetch")', "full", "tp", "ep"),
    _contestant("4 threads", _several, "multi_thread_safetensors_weights_iterator", "full", "reload", "tp"),
    _contestant("bin", _pt, "pt_weights_iterator", "bin"),
)
