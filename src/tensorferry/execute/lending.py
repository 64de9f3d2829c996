"""Reads whose bytes lie in the page cache, and would be staged, are copied to parameters from where they lie, if the
storage lends them: one copy in place of two, and only of what is needed. What is left of a batch is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch, Piece, Read, Task
from tensorferry.execute.base import Counters, Parameters
from tensorferry.execute.blame import entries_of, reading_for
from tensorferry.execute.placing import in_place, landing
from tensorferry.execute.ways import Ways
from tensorferry.numerics.threads import alone
from tensorferry.numerics.torch_dtypes import torch_dtype

__all__ = ["LentReads"]

_LEASED = "cached: leased"
"""What a report calls this way."""


class _Use(NamedTuple):
    task: Task
    piece: Piece


@dataclass(frozen=True)
class LentReads:
    """Does reads of `plan` by copying what `ways` lend into `parameters`; may be used from several threads.

    stopped: whether nothing more is to be copied.
    """

    plan: Plan
    ways: Ways
    parameters: Parameters
    stopped: Callable[[], bool]

    def place(self, batch: Batch, counters: Counters) -> Batch:
        """Do those reads of `batch` that can be lent, count them, and return the batch without them. Raises ReadError.

        Not what is read straight to its place, which takes no longer; nor what is computed, as whoever computes may
        take long, or keep what he gets.
        """
        lendable = [n for n, r in enumerate(batch.reads) if r.times == 1 and self.ways.may_lend(r.file, r.length)]
        if not lendable:
            return batch
        users: dict[int, list[_Use]] = defaultdict(list)
        for task in batch.tasks:
            for part in task.inputs:
                for piece in part.pieces:
                    users[piece.read].append(_Use(task, piece))
        done: set[int] = set()
        for n in lendable:
            if self.stopped() or not self._is_staged(batch.reads[n], users[n]):
                continue
            with alone(), reading_for(entries_of(self.plan, batch, n)):
                if self._copied(batch.reads[n], users[n], counters):
                    done.add(n)
        return _without(batch, done) if done else batch

    def _is_staged(self, read: Read, uses: list[_Use]) -> bool:
        """Whether a read is only to be copied on, and from no address that is odd for its type: that is two copies."""
        straight = True
        for task, piece in uses:
            step = self.plan.steps[task.step]
            parameter, kind = self.parameters[step.parameter], torch_dtype(step.sources[0].entry.dtype)
            if step.via is not None or not parameter.is_cpu or (read.offset + piece.offset) % kind.itemsize:
                return False
            straight = straight and in_place(self.plan, task, parameter) is not None
        return not straight

    def _copied(self, read: Read, uses: list[_Use], counters: Counters) -> bool:
        """Copy what a read would bring, if it is lent."""
        with self.ways.lend(read.file, read.offset, read.length) as view:
            if view is None:
                return False
            for task, piece in uses:
                step = self.plan.steps[task.step]
                landed = landing(self.plan, task, self.parameters[step.parameter])
                # From the piece on, as torch sees no numbers at an odd distance from where memory begins for it.
                lent = torch.frombuffer(view, dtype=torch.uint8, offset=piece.offset)
                counters.lost(step.parameter, landed.put(lent, piece._replace(offset=0)))
                counters.direct_bytes += piece.box.size * step.sources[0].entry.dtype.block_bytes
        counters.bytes_read += read.length
        counters.reads += 1
        counters.came(_LEASED, read.length)
        return True


def _without(batch: Batch, done: set[int]) -> Batch:
    """Return a batch without some of its reads, the pieces that they brought, and the tasks that have no others."""
    left = [n for n in range(len(batch.reads)) if n not in done]
    number = {old: new for new, old in enumerate(left)}
    tasks = []
    for task in batch.tasks:
        if any(piece.read in done for part in task.inputs for piece in part.pieces):
            (part,) = task.inputs  # nothing is computed of it
            pieces = tuple(piece for piece in part.pieces if piece.read not in done)
            if not pieces:
                continue
            task = task._replace(inputs=(part._replace(pieces=pieces),))
        tasks.append(_renumbered(task, number))
    staging = batch.staging - sum(batch.reads[n].length for n in done)
    return Batch(tuple(batch.reads[n] for n in left), tuple(tasks), staging)


def _renumbered(task: Task, number: dict[int, int]) -> Task:
    inputs = (
        part._replace(pieces=tuple(piece._replace(read=number[piece.read]) for piece in part.pieces))
        for part in task.inputs
    )
    return task._replace(inputs=tuple(inputs))
