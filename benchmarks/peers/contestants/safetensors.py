"""safetensors: `safe_open` by mmap and by pread, `load_file` by pread, and `load` of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.contestant import Contestant

if TYPE_CHECKING:
    from benchmarks.peers.task import Task

_IMPORTS = ("safetensors.torch",)


def _open(task: Task, **options: str) -> None:
    from safetensors import safe_open

    for path in task.files:
        with safe_open(path, framework="pt", **options) as file:
            for name in file.offset_keys():
                if name not in task.parts:
                    continue
                if task.parts[name] is None:
                    task.put(name, file.get_tensor(name))
                else:
                    task.parameters[name].data.copy_(file.get_slice(name)[task.slices(name)])


def _mmap(task: Task) -> None:
    _open(task)


def _pread(task: Task) -> None:
    _open(task, backend="pread")


def _pread_own(task: Task) -> None:
    from safetensors.torch import load_file

    for path in task.files:
        for name, tensor in load_file(path, backend="pread").items():
            task.give(name, tensor)


def _bytes(task: Task) -> None:
    from safetensors.torch import load

    for path in task.files:
        for name, tensor in load(Path(path).read_bytes()).items():
            task.put(name, tensor)


CONTESTANTS = (
    Contestant("safetensors mmap", _mmap, "safe_open, get_tensor or get_slice, copy_", imports=_IMPORTS),
    Contestant("safetensors pread", _pread, 'safe_open(backend="pread"), copy_', imports=_IMPORTS),
    Contestant(
        "safetensors pread, own memory", _pread_own, 'load_file(backend="pread")', ("full", "moe", "many"),
        imports=_IMPORTS, memory="own",
    ),
    Contestant("safetensors bytes", _bytes, "load(bytes), copy_", ("full", "moe", "many"), imports=_IMPORTS),
)  # fmt: skip
