"""Where the bytes of a batch are staged: in pinned memory, or on the device where it can read files by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from tensorferry.core.schedule import Batch, Read, Schedule
from tensorferry.execute.base import Counters
from tensorferry.execute.blame import entries_of, reading_for
from tensorferry.execute.device.ring import Block, Ring, host_memory
from tensorferry.execute.device.streams import Accelerator, Event, Stream
from tensorferry.execute.placing import stays_on_cpu
from tensorferry.execute.ways import Ways, reads_in_part
from tensorferry.numerics.memory import bytes_of
from tensorferry.storage.base import SupportsDevice
from tensorferry.waiting import Flag

__all__ = ["Staged", "Stager"]

Staged = tuple[list[torch.Tensor], list[Event]]
"""The bytes of each read of a batch, and the list to which the events go that they are needed until."""

_ALIGNED, _PAGE = 512, 4096
"""Bytes that addresses and offsets in a file are equal modulo: what is aligned there is aligned here, which reads past
the page cache need, too. Devices that read by themselves read pages."""


class Stager:
    """Reads batches of one run; may be used from several threads. What is staged at once is bounded by the schedule."""

    def __init__(
        self, schedule: Schedule, ways: Ways, streams: dict[torch.device, Stream], accelerator: Accelerator,
        direct: SupportsDevice | None,
    ) -> None:  # fmt: skip
        self._schedule, self._ways, self._direct = schedule, ways, direct
        bound = schedule.max_staging
        host = [_laid_out(batch.reads, _ALIGNED)[1] for batch in schedule.batches]
        pin = partial(accelerator.pin, device=next(iter(streams)))
        self._host = Ring(host_memory(pin), _slot(host, bound), bound)
        pages = [_laid_out(batch.reads, _PAGE)[1] + _PAGE * len(batch.reads) for batch in schedule.batches if direct]
        share = bound // max(len(streams), 1)
        self._there = {
            device: Ring(_device_memory(accelerator, device, stream), _slot(pages, share), share)
            for device, stream in streams.items()
        }

    @property
    def peak(self) -> int:
        """Most bytes that were staged at once, on the CPU and on devices that read by themselves."""
        return self._host.peak + sum(ring.peak for ring in self._there.values())

    @contextmanager
    def staged(
        self, number: int, devices: Sequence[torch.device], counters: Counters, stopped: Flag
    ) -> Iterator[Staged | None]:
        """Yield the bytes of a batch, or None where reading was stopped meanwhile; they are gone afterwards."""
        batch = self._schedule.batches[number]
        if self._direct is not None and len(devices) == 1 and self._goes_direct(batch, self._direct):
            reads, read = [self._in_pages(r) for r in batch.reads], self._to_device
            ring, align = self._there[devices[0]], _PAGE
        else:
            reads, read, ring, align = list(batch.reads), self._to_host, self._host, _ALIGNED
        where, size = _laid_out(reads, align)
        in_part = reads_in_part(self._schedule.plan, batch) if self._ways.shared else ()
        with ring.lend(size) as (block, events):
            staged = [block[at : at + length] for at, length in where]
            for n, (wanted, out) in enumerate(zip(reads, staged, strict=True)):
                if stopped.is_set():
                    break
                with reading_for(entries_of(self._schedule.plan, batch, n)):
                    read(wanted, out, counters, in_part=n in in_part)
                counters.bytes_read += wanted.length
                counters.copied_bytes += wanted.length
                counters.reads += wanted.times
            views = [_part(out, r, had) for out, r, had in zip(staged, batch.reads, reads, strict=True)]
            yield None if stopped.is_set() else (views, events)

    def close(self) -> None:
        """Wait until no device needs what was staged, and let go of it."""
        with ExitStack() as closing:
            for ring in (self._host, *self._there.values()):
                closing.callback(ring.close)

    def _goes_direct(self, batch: Batch, direct: SupportsDevice) -> bool:
        if any(stays_on_cpu(self._schedule.plan.steps[task.step]) for task in batch.tasks):
            return False
        return all(read.times == 1 and direct.reaches(read.file) for read in batch.reads)

    def _in_pages(self, read: Read) -> Read:
        """Return the pages that a read lies in, as far as the file goes."""
        first = read.offset - read.offset % _PAGE
        last = -(-(read.offset + read.length) // _PAGE) * _PAGE
        return Read(read.file, first, min(last, self._ways.storage.stat(read.file).size) - first)

    def _to_host(self, read: Read, out: torch.Tensor, counters: Counters, *, in_part: bool) -> None:
        if read.times == 1:
            self._ways.read(read.file, read.offset, [bytes_of(out)], counters, in_part=in_part)
        else:
            self._ways.read_runs(read.file, read.offset, read.stride, read.run, bytes_of(out), counters)

    def _to_device(self, read: Read, out: torch.Tensor, counters: Counters, *, in_part: bool) -> None:
        assert self._direct is not None
        self._direct.read_to_device(read.file, read.offset, out)
        counters.came("by the device", read.length)


def _device_memory(accelerator: Accelerator, device: torch.device, stream: Stream) -> Callable[[int], Block]:
    """Return what makes blocks of a device that are free of what its memory was used for before."""

    def make(nbytes: int) -> Block:
        made: list[torch.Tensor] = []
        stream.submit(lambda: made.append(accelerator.empty(nbytes, device)))
        stream.record().synchronize()
        return Block(made[0], lambda: None)

    return make


def _part(block: torch.Tensor, read: Read, had: Read) -> torch.Tensor:
    return block if read is had else block[read.offset - had.offset :][: read.length]


def _slot(sizes: Sequence[int], bound: int) -> int:
    return min(max(sizes, default=0), bound)


def _laid_out(reads: Sequence[Read], align: int) -> tuple[list[tuple[int, int]], int]:
    """Return (start, length) in a block for each read, and the size of the block; see `_ALIGNED`."""
    where, at = [], 0
    for read in reads:
        at += (read.offset - at) % align if read.times == 1 else -at % align
        where.append((at, read.length))
        at += read.length
    return where, at
