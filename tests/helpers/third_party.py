"""Executors of other libraries over folders of safetensors files, and stand-ins for what is not on this machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest
import torch
from safetensors import safe_open

from helpers.checkpoints import write_index, write_safetensors
from tensorferry.checkpoint import Checkpoint, open_checkpoint
from tensorferry.core.lower import lower
from tensorferry.core.planning import make_plan
from tensorferry.core.ruleset import RuleSet
from tensorferry.core.schedule import Schedule
from tensorferry.core.target import TargetTensor
from tensorferry.loaders.third_party.batches import FileBatch
from tensorferry.loaders.third_party.executor import COMMON_TYPES, LibraryExecutor, Tensors
from tensorferry.loaders.third_party.fastsafetensors import FastsafetensorsExecutor
from tensorferry.loaders.third_party.runai import RunaiExecutor
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape

CPU = torch.device("cpu")
MIB = 1 << 20

LIBRARIES: dict[str, Callable[[], LibraryExecutor]] = {
    "fastsafetensors": lambda: FastsafetensorsExecutor(CPU, 16 * MIB),
    "runai_streamer": lambda: RunaiExecutor(CPU, 16 * MIB),
}
"""Those that read on the CPU, by load_format."""

_MODULES = {"fastsafetensors": "fastsafetensors", "runai_streamer": "runai_model_streamer"}


def need(load_format: str) -> None:
    """Skip the test where the library has no wheel for this machine."""
    pytest.importorskip(_MODULES[load_format], reason=f"the library of {load_format} has no wheel for this machine")


def planned(checkpoint: Checkpoint, *target: TargetTensor, rules: RuleSet | None = None) -> Schedule:
    """Return a schedule that fills `target`, or a parameter for every entry."""
    wanted = target or [TargetTensor.plain(e.name, e.dtype, e.shape) for e in checkpoint.catalogue.values()]
    plan = make_plan(checkpoint.catalogue, {t.name: t for t in wanted}, rules or RuleSet())
    plan.raise_for_problems()
    return lower(plan, max_gap=0, max_read=1 << 20, max_staging=1 << 20, waste=2.0)


def empty(schedule: Schedule) -> dict[str, torch.Tensor]:
    """Return parameters for `schedule`, all bits set."""
    out = {}
    for name, spec in schedule.plan.parameters.items():
        shape, kind = torch_shape(spec.dtype, spec.shape), torch_dtype(spec.dtype)
        out[name] = (
            torch.full((torch.Size(shape).numel() * kind.itemsize,), 255, dtype=torch.uint8).view(kind).view(shape)
        )
    return out


def filled(executor: Any, folder: Path, *target: TargetTensor, **options: Any) -> dict[str, torch.Tensor]:
    """Return what `executor` fills from the checkpoint in `folder`."""
    with open_checkpoint(folder) as checkpoint:
        schedule = planned(checkpoint, *target, **options)
        found = empty(schedule)
        executor.run(schedule, checkpoint.storage, found)
    return found


class Recorded(LibraryExecutor):
    """Another executor, and the batches that it was asked for."""

    def __init__(self, inner: LibraryExecutor) -> None:
        self.inner = inner
        self.name, self.dtypes, self.borrowed = inner.name, inner.dtypes, inner.borrowed
        self.asked: list[FileBatch] = []

    def check(self, wanted: Sequence[FileBatch]) -> None:
        self.inner.check(wanted)

    def tensors(self, batch: FileBatch) -> Tensors:
        self.asked.append(batch)
        yield from self.inner.tensors(batch)


class Borrowing(LibraryExecutor):
    """Hands on every tensor in the same buffer, which is overwritten as soon as the next one is asked for."""

    name, dtypes, borrowed = "borrowing", COMMON_TYPES, True

    def tensors(self, batch: FileBatch) -> Tensors:
        for path in batch.paths:
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    tensor = opened.get_tensor(name).clone()
                    yield name, tensor
                    tensor.zero_()


class StandIn:
    """What `instanttensor.safe_open` does, by the signature of 0.2.2, on the CPU and over safetensors."""

    calls: list[dict[str, Any]]

    def __init__(
        self,
        filename: str | list[str],
        framework: str,
        device: int | str | torch.device,
        process_group: Any = None,
        *,
        buffer_size: int | None = None,
        chunk_size: int | None = None,
        concurrency: int | None = None,
        io_depth: int | None = None,
        max_free_mem_usage: float | None = None,
        load_now: bool = True,
        copy: bool = True,
        backend: Any = None,
        tensor_filter: list[str] | None = None,
        tensor_name_match_mode: str = "glob",
    ) -> None:
        assert framework == "pt"
        assert torch.device(device).type == "cuda"
        assert tensor_name_match_mode == "exact"
        assert isinstance(filename, list)
        self.files, self.wanted = filename, set(tensor_filter or [])
        self.calls.append({"files": filename, "buffer_size": buffer_size, "copy": copy, "device": device})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self.files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if name in self.wanted:
                        yield name, opened.get_tensor(name)


def pretend_instanttensor(patch: pytest.MonkeyPatch, *, version: str = "0.2.2") -> list[dict[str, Any]]:
    """Have this process find a CUDA device and an instanttensor that is a `StandIn`; return the calls of it."""
    module, kind = ModuleType("instanttensor"), type("safe_open", (StandIn,), {"calls": []})
    module.safe_open = kind  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "instanttensor", module)
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    pretend_version(patch, "instanttensor", version)
    calls: list[dict[str, Any]] = kind.calls  # type: ignore[attr-defined]
    return calls


def pretend_version(patch: pytest.MonkeyPatch, distribution: str, version: str | None) -> None:
    """Have this process find that version of a distribution, or none."""
    real = importlib.metadata.version

    def found(name: str) -> str:
        if name != distribution:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    patch.setattr("tensorferry.loaders.third_party.library.version", found)


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """Assert that the block leaves the environment of the process as it was."""
    before = dict(os.environ)
    yield
    assert dict(os.environ) == before


def write_sharded(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> Path:
    """Write `tensors` into so many shards in turn, with an index."""
    names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    where = {key: names[n % shards] for n, key in enumerate(tensors)}
    for name in names:
        write_safetensors(folder / name, {k: t for k, t in tensors.items() if where[k] == name})
    write_index(folder / "model.safetensors.index.json", where)
    return folder
