"""A schedule in two: what goes to devices, and what stays on the CPU. Values only, reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch, Input, Piece, Schedule, Task

__all__ = ["divided"]


def divided(schedule: Schedule, chosen: Callable[[str], bool]) -> tuple[Schedule, Schedule]:
    """Return the part of a schedule that fills the parameters that are `chosen`, by name, and the rest.

    Batches that do both become two: of a read that serves both, each takes what it needs. Nothing is read twice but
    holes between.
    """
    plan = schedule.plan
    mine: list[Batch] = []
    others: list[Batch] = []
    for batch in schedule.batches:
        wanted = [task for task in batch.tasks if chosen(plan.steps[task.step].parameter)]
        if len(wanted) in (0, len(batch.tasks)):
            (mine if wanted else others).append(batch)
            continue
        mine.append(_part(plan, batch, wanted))
        others.append(_part(plan, batch, [task for task in batch.tasks if task not in wanted]))
    return replace(schedule, batches=tuple(mine)), replace(schedule, batches=tuple(others))


def _part(plan: Plan, batch: Batch, tasks: Sequence[Task]) -> Batch:
    """Return a batch of some of the tasks, with what they need of its reads."""
    used: dict[int, tuple[int, int]] = {}
    for task in tasks:
        for part in task.inputs:
            size = plan.steps[task.step].sources[part.source].entry.dtype.block_bytes
            for piece in part.pieces:
                if batch.reads[piece.read].times > 1:  # runs stay as they are
                    used[piece.read] = (0, batch.reads[piece.read].length)
                    continue
                first, last = used.get(piece.read, (piece.offset, piece.offset))
                used[piece.read] = (min(first, piece.offset), max(last, piece.offset + _extent(piece) * size))
    order = sorted(used)
    number = {old: new for new, old in enumerate(order)}
    reads = tuple(
        batch.reads[n]._replace(offset=batch.reads[n].offset + used[n][0], length=used[n][1] - used[n][0])
        for n in order
    )
    moved = tuple(task._replace(inputs=tuple(_moved(part, number, used) for part in task.inputs)) for task in tasks)
    return Batch(reads, moved, sum(read.length for read in reads) + batch.room)


def _moved(part: Input, number: dict[int, int], used: dict[int, tuple[int, int]]) -> Input:
    pieces = (p._replace(read=number[p.read], offset=p.offset - used[p.read][0]) for p in part.pieces)
    return part._replace(pieces=tuple(pieces))


def _extent(piece: Piece) -> int:
    """Blocks from the first to the last one of a piece, both counted."""
    if not piece.box.size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(piece.box.shape, piece.strides, strict=True))
