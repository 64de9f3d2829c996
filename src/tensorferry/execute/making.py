"""Reading entries that are made of others: a plan with one parameter, done in the caller's thread."""

from __future__ import annotations

from functools import lru_cache

import torch

from tensorferry.core.boxes import Region
from tensorferry.core.catalogue import TensorEntry
from tensorferry.core.lower import lower
from tensorferry.core.made import resolved
from tensorferry.core.plan import Plan, Source, Step
from tensorferry.core.schedule import Read, Schedule
from tensorferry.core.transforms import TensorSpec
from tensorferry.execute.blame import reading_for
from tensorferry.execute.placing import perform
from tensorferry.numerics.memory import bytes_of
from tensorferry.numerics.torch_dtypes import torch_dtype, torch_shape
from tensorferry.storage.reading import ReadInto

__all__ = ["is_made", "read_made", "reads_of", "room_of"]

_GAP, _READ, _WASTE = 64 << 10, 8 << 20, 1.25


def is_made(entry: TensorEntry) -> bool:
    """Whether something has to be done to have the entry, beside reading its bytes."""
    return entry.made is not None and entry.made.via is not None


def reads_of(entry: TensorEntry) -> list[Read]:
    """Return what has to be read to have the entry, in order."""
    if is_made(entry):
        return [
            Read(read.file, *run) for batch in _schedule(entry).batches for read in batch.reads for run in read.runs
        ]
    return [Read(*chunk.span) for chunk in entry.chunks if chunk.span is not None]


def room_of(entry: TensorEntry) -> int:
    """Return the bytes that reading an entry takes: those of its values, and what is staged to make them."""
    if is_made(entry):
        return entry.nbytes + _schedule(entry).largest_batch
    if entry.span is not None:
        return entry.nbytes
    return entry.nbytes + max((c.span.length for c in entry.chunks if c.span is not None), default=0)


def read_made(read_into: ReadInto, entry: TensorEntry) -> torch.Tensor:
    """Return the values of an entry that `is_made`, row-major, on the CPU. read_into: as `Storage.read_into`."""
    out = torch.empty(torch_shape(entry.dtype, entry.shape), dtype=torch_dtype(entry.dtype), device="cpu")
    schedule = _schedule(entry)
    for batch in schedule.batches:
        staged = []
        for read in batch.reads:
            staged.append(torch.empty(read.length, dtype=torch.uint8, device="cpu"))
            target = bytes_of(staged[-1])
            with reading_for([entry.name]):
                for n, (offset, length) in enumerate(read.runs):
                    read_into(read.file, offset, target[n * length : (n + 1) * length])
        for task in batch.tasks:
            perform(schedule.plan, task, staged, out)
    return out


@lru_cache(maxsize=64)
def _schedule(entry: TensorEntry) -> Schedule:
    whole = Region.whole(entry.shape)
    step = resolved(Step(entry.name, whole, (Source(entry, whole),)))
    plan = Plan((step,), {entry.name: TensorSpec(entry.dtype, entry.shape)})
    return lower(plan, max_gap=_GAP, max_read=_READ, max_staging=_READ, waste=_WASTE)
