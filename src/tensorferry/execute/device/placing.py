"""From staged bytes to parameters on a device: one batch, put into a stream. What that does is in `execute.placing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import torch

from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch, Task
from tensorferry.execute.base import Counters
from tensorferry.execute.device.streams import Accelerator
from tensorferry.execute.placing import perform, plain_part, stays_on_cpu
from tensorferry.numerics.casts import Loss, counting_later, writing

__all__ = ["Counts", "Placed", "Plain", "copy", "place", "settled", "sorted_out"]

Counts = dict[str, list[torch.Tensor]]
"""By parameter, what casts spoiled, as `counting_later` counts it."""


class _Uploads(Sequence[torch.Tensor]):
    """The bytes of the reads of a batch on a device, sent when they are first asked for; those of a device stay."""

    def __init__(
        self, batch: Batch, staged: Sequence[torch.Tensor], accelerator: Accelerator, device: torch.device
    ) -> None:
        self._batch, self._staged = batch, staged
        self._accelerator, self._device = accelerator, device
        self._there: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._staged)

    @overload
    def __getitem__(self, at: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, at: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        if at not in self._there:
            self._there[at] = self._sent(at)
        return self._there[at]

    def _sent(self, at: int) -> torch.Tensor:
        here = self._staged[at]
        if here.device == self._device and here.device.type != "cpu":
            return here
        before = self._batch.reads[at].offset % 64  # what is aligned in the file is aligned there
        there = self._accelerator.empty(before + here.numel(), self._device)[before:]
        return there.copy_(here, non_blocking=True)


class Placed(NamedTuple):
    """A task of a batch, and the parameter that it fills."""

    task: Task
    parameter: torch.Tensor


class Plain(NamedTuple):
    """A piece of what was staged, and where on the device its bytes belong, as they are."""

    into: torch.Tensor
    read: int
    offset: int


def sorted_out(plan: Plan, work: Sequence[Placed]) -> tuple[list[Plain], list[Placed]]:
    """Return which bytes go to the device just as they are, and the tasks that are left."""
    plain, rest = list[Plain](), list[Placed]()
    for task, parameter in work:
        part = plain_part(plan, task, parameter)
        if part is None:
            rest.append(Placed(task, parameter))
        elif part.numel():
            (piece,) = task.inputs[0].pieces
            # A single element keeps the stride of what it is part of, whatever it is reshaped to.
            raw = part.as_strided((part.numel(),), (1,)).view(torch.uint8)
            plain.append(Plain(raw, piece.read, piece.offset))
    return plain, rest


def copy(plain: Sequence[Plain], staged: Sequence[torch.Tensor]) -> None:
    """Put bytes where they belong; called inside the stream that does it. Takes no memory on the device."""
    for into, read, offset in plain:
        with writing(into):
            into.copy_(staged[read][offset : offset + into.numel()], non_blocking=True)


def place(
    plan: Plan, batch: Batch, work: Sequence[Placed], staged: Sequence[torch.Tensor], accelerator: Accelerator,
    device: torch.device, counts: Counts,
) -> None:  # fmt: skip
    """Do tasks of `batch` that are more than a copy, and whose parameters are on `device`; called inside the stream.

    staged: the bytes of its reads, in pinned memory or on the device already. They go to the device as they are and
    are cast, decoded and put in place there.
    """
    uploads = _Uploads(batch, staged, accelerator, device)
    for task, parameter in work:
        step = plan.steps[task.step]
        with counting_later() as found:
            perform(plan, task, staged if stays_on_cpu(step) else uploads, parameter)
        if found:
            counts[step.parameter] = _summed([*counts.get(step.parameter, ()), *found])


def _summed(counts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one count for each device, so that they take no memory to speak of."""
    sums: dict[torch.device, torch.Tensor] = {}
    for count in counts:
        sums[count.device] = sums[count.device] + count if count.device in sums else count
    return list(sums.values())


def settled(counters: Counters, counts: Counts) -> None:
    """Add to `counters` what was counted, which waits for the devices."""
    for parameter, found in counts.items():
        for count in found:
            counters.lost(parameter, Loss(*count.tolist()))
