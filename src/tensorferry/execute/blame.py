"""Saying of a failed read which tensors it was for: a storage knows files and offsets only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tensorferry.core.names import fold
from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Batch
from tensorferry.errors import ReadError, TensorferryError, shown

__all__ = ["entries_of", "reading_for", "too_short"]

_LISTED = 3


@contextmanager
def reading_for(names: Iterable[str]) -> Iterator[None]:
    """Add to an error that is raised inside which tensors were being read; the class of the error stays."""
    try:
        yield
    except TensorferryError as error:
        error.args = (f"{error} ({_while(names)})",)
        raise
    except Exception as error:
        error.add_note(_while(names))
        raise


def too_short(file: str, name: str) -> ReadError:
    """Return what to raise where a file that is mapped ends before a tensor that it should have."""
    return ReadError(f"{file}: is shorter than its header says, or was cut since: {shown(name)} ends past it")


def _while(names: Iterable[str]) -> str:
    folded = [shown(f.text) for f in fold(dict.fromkeys(names))]
    more = f" and {len(folded) - _LISTED} more" if len(folded) > _LISTED else ""
    return f"while reading {', '.join(folded[:_LISTED])}{more}"


def entries_of(plan: Plan, batch: Batch, read: int) -> Iterator[str]:
    """Yield the names of the entries that a read of a batch brings bytes of."""
    for task in batch.tasks:
        for part in task.inputs:
            if any(piece.read == read for piece in part.pieces):
                yield plan.steps[task.step].sources[part.source].entry.name
