"""Memory for a model that is loaded again: where its tensors were, or beside them as long as they must not change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorferry.core.amounts import human_bytes
from tensorferry.core.target import Target
from tensorferry.errors import ConfigError
from tensorferry.modules.aside import overwrite
from tensorferry.modules.describe import identity_of, places
from tensorferry.modules.distributed import around, is_dtensor, memory_of
from tensorferry.modules.materialize import Materialized

__all__ = ["Again", "Shadows", "free_memory", "refuse_if_short"]


class Again(Materialized):
    """What `Materialized` is; tensors on meta get memory `where` those were that hung in their places, by name."""

    def __init__(
        self, model: nn.Module, target: Target, device: torch.device, *, where: Mapping[str, torch.device], **more: Any
    ) -> None:
        super().__init__(model, target, device, **more)
        self._where = where

    def device_of(self, name: str) -> torch.device:
        """Return where a tensor is, or will be when it is looked up."""
        tensor = self._places[name][0].tensor
        return self._where.get(name, self._device) if tensor.is_meta else tensor.device

    def _with_memory(self, name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        return super()._with_memory(name, like, self._where.get(name, device) if like.is_meta else device)


class Shadows(Again):
    """What `Again` is, but looking up a tensor that has memory gives another one like it.

    `swap` gives the values of those to the model, which has its own until then.
    """

    def __init__(
        self, model: nn.Module, target: Target, device: torch.device, *, where: Mapping[str, torch.device], **more: Any
    ) -> None:
        super().__init__(model, target, device, where=where, **more)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        found = super().__getitem__(name)
        self.touched = False  # what hangs on the model by now can be taken away again
        return found

    def swap(self) -> None:
        """Overwrite the tensors of the model; doing it again changes nothing."""
        for live, shadow in self._pairs:
            overwrite(live, shadow)

    def _materialize(self, name: str) -> torch.Tensor:
        hanging = self._places.get(name, ())
        if not hanging or hanging[0].tensor.is_meta or name in self._shares:
            return super()._materialize(name)
        tensor = hanging[0].tensor
        live = memory_of(tensor)
        shadow = torch.empty_like(live.detach())
        self._pairs.append((live, shadow))
        for place in hanging:
            if place.tensor.is_meta:  # of a module that post-processes what another one shares with it
                registry: dict[str, Any] = place.module._parameters if place.is_parameter else place.module._buffers
                plain = nn.Parameter(shadow, requires_grad=tensor.requires_grad)
                registry[place.leaf] = around(shadow, tensor) if is_dtensor(tensor) else plain
        return shadow


def refuse_if_short(model: nn.Module, names: set[str]) -> None:
    """Raise ConfigError where a device has no memory for second copies of the tensors of those names."""
    needed: dict[torch.device, int] = defaultdict(int)
    seen: set[object] = set()
    for place in places(model):
        identity = identity_of(place.tensor)
        if place.name in names and identity not in seen:
            seen.add(identity)
            needed[place.tensor.device] += memory_of(place.tensor).nbytes
    for device, nbytes in needed.items():
        free = free_memory(device)
        if free is not None and nbytes > free:
            raise ConfigError(
                f"atomic: new values are kept beside the old ones until all of them are there, which takes "
                f"{human_bytes(nbytes)} more on {device}, and {human_bytes(free)} are free; leave atomic out to "
                "overwrite the old ones as the new ones come"
            )


def free_memory(device: torch.device) -> int | None:
    """Return how many bytes can be had on `device`, None where that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [n for n in (_available(), _left_to_the_group()) if n is not None]
    return min(known, default=None)


def _available() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, LookupError):
        return None


def _left_to_the_group() -> int | None:
    """Return what a control group (version 2) lets its processes have beside what it counts; page cache can go."""
    folder = Path("/sys/fs/cgroup")
    try:
        most, used = (folder / "memory.max").read_text(), int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(most) - used + int(stat.get("file", 0))
    except (OSError, ValueError):  # no such group, or "max": no bound
        return None
