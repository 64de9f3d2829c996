"""What every executor takes and gives: the protocol, and the counters that tests assert and reports print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Schedule
from tensorferry.numerics.casts import Loss
from tensorferry.progress import SILENT, Progress
from tensorferry.storage.base import Storage

__all__ = ["Counters", "Executor", "KnowsDevices", "OnReady", "Parameters", "Remaining"]

Parameters = Mapping[str, torch.Tensor]
"""The tensors to fill, by name. Looking one up may allocate it; executors look up only what they fill next."""


@runtime_checkable
class KnowsDevices(Protocol):
    """Parameters that say where they are, or will be, without giving them memory."""

    def device_of(self, name: str) -> torch.device:
        """Return the device of the parameter `name`."""
        ...


OnReady = Callable[[str], None]
"""Told the name of each parameter when its last element is written; called from the thread that called `run`."""


@dataclass(slots=True)
class Counters:
    """What a run did, exactly.

    bytes_read and reads: requested from the storage. direct_bytes: of these, those that went straight into
    parameters; copied_bytes: those that were copied in memory after they had come. staging_peak: most bytes staged at
    once. ways: how bytes came, to how many: "direct" past the page cache, "cached" as they were in it, "cached:
    leased" copied from there while nobody may cut the file, "cached: borrowed" as pages of it for some time, "buffered"
    through it, with the reason, "fetched" from an object store, and "from another rank", which read them: they are not
    in bytes_read. losses: what casts to a narrower
    range spoiled.
    """

    bytes_read: int = 0
    reads: int = 0
    direct_bytes: int = 0
    copied_bytes: int = 0
    staging_peak: int = 0
    ways: dict[str, int] = field(default_factory=dict)
    losses: dict[str, Loss] = field(default_factory=dict)

    def lost(self, parameter: str, loss: Loss) -> None:
        """Add what one copy into `parameter` spoiled."""
        if loss != Loss():
            self.losses[parameter] = self.losses.get(parameter, Loss()) + loss

    def came(self, way: str, nbytes: int) -> None:
        """Count bytes that came in some way."""
        if nbytes:
            self.ways[way] = self.ways.get(way, 0) + nbytes

    def absorb(self, other: Counters) -> None:
        """Add what another part of the same run did; peaks are the caller's."""
        self.bytes_read += other.bytes_read
        self.reads += other.reads
        self.direct_bytes += other.direct_bytes
        self.copied_bytes += other.copied_bytes
        for way, nbytes in other.ways.items():
            self.came(way, nbytes)
        for parameter, loss in other.losses.items():
            self.lost(parameter, loss)


class Executor(Protocol):
    """Moves the bytes of a schedule. The parameters are whole when it returns; when it raises, some may be written."""

    def run(
        self,
        schedule: Schedule,
        storage: Storage,
        parameters: Parameters,
        *,
        on_ready: OnReady | None = None,
        progress: Progress = SILENT,
    ) -> Counters:
        """Fill `parameters` and return what was done; raises ReadError, or what `on_ready` raises."""
        ...


class Remaining:
    """Counts the steps or tasks that each parameter still waits for."""

    __slots__ = ("_left",)

    def __init__(self, parameters: Mapping[str, int]) -> None:
        self._left = dict(parameters)

    @classmethod
    def of_steps(cls, plan: Plan) -> Remaining:
        """Wait for every step of `plan`."""
        left: dict[str, int] = {}
        for step in plan.steps:
            left[step.parameter] = left.get(step.parameter, 0) + 1
        return cls(left)

    @classmethod
    def of_tasks(cls, schedule: Schedule) -> Remaining:
        """Wait for every task of `schedule`."""
        left: dict[str, int] = {}
        for batch in schedule.batches:
            for task in batch.tasks:
                name = schedule.plan.steps[task.step].parameter
                left[name] = left.get(name, 0) + 1
        return cls(left)

    def done(self, parameter: str) -> bool:
        """Count one off and return whether it was the last."""
        self._left[parameter] -= 1
        return self._left[parameter] == 0
