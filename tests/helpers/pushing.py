"""An executor that reads nothing by itself: tensors are brought to it, and pushed into a `Feeder`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.schedule import Schedule
from tensorferry.execute import Counters, Feeder
from tensorferry.execute.base import OnReady, Parameters
from tensorferry.execute.simple import read_entry
from tensorferry.progress import SILENT, Progress
from tensorferry.storage.base import Storage

__all__ = ["Bring", "Pushing", "lent"]

Bring = Callable[[Storage, Sequence[TensorEntry]], Iterable[tuple[str, torch.Tensor]]]
"""Yields the name and the values of each entry, in order."""


class Pushing:
    """Whole tensors come from elsewhere; borrowed: in memory that whoever brings them wants back at once."""

    def __init__(self, bring: Bring, *, borrowed: bool = False) -> None:
        self._bring, self._borrowed = bring, borrowed

    def run(
        self,
        schedule: Schedule,
        storage: Storage,
        parameters: Parameters,
        *,
        on_ready: OnReady | None = None,
        progress: Progress = SILENT,
    ) -> Counters:
        entries = {s.entry.name: s.entry for step in schedule.plan.steps for s in step.sources}
        feeder = Feeder(schedule.plan, parameters, on_ready=on_ready, borrowed=self._borrowed)
        progress.start(sum(entry.nbytes for entry in entries.values()), "weights")
        try:
            for name, values in self._bring(storage, list(entries.values())):
                feeder.feed(name, values)
                progress.advance(entries[name].nbytes)
        finally:
            progress.finish()
        counters = feeder.finish()
        counters.reads = len(entries)
        return counters


def lent(storage: Storage, entries: Sequence[TensorEntry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Bring each entry in memory that is spoiled as soon as the next is asked for."""
    for entry in entries:
        buffer = read_entry(storage, entry)
        yield entry.name, buffer
        buffer.view(-1).view(torch.uint8).zero_()
