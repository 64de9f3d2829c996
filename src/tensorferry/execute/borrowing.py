"""Loading with memory that is borrowed: parameters have pages of the page cache until something else is made of them.

Engines that make other tensors of what was loaded, as vLLM packs matrices for the CPU, need no copy of it in memory of
its own before. That is for what is in the page cache already; to bring it there takes as long as to read it past it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress

import torch

from tensorferry.core.plan import Plan
from tensorferry.core.schedule import Schedule
from tensorferry.errors import PlanError, TensorferryError
from tensorferry.execute.base import Counters, Executor, OnReady, Parameters
from tensorferry.execute.blame import reading_for
from tensorferry.execute.borrowed import Borrowed
from tensorferry.execute.lying import Paged, PlainRun, paged
from tensorferry.progress import SILENT, Progress
from tensorferry.storage.base import Storage, SupportsUncached
from tensorferry.storage.pages import PAGE, can_borrow

__all__ = ["Adopt", "BorrowingExecutor", "borrow"]

Adopt = Callable[[str, torch.Tensor], None]
"""Has a parameter lie in the memory of a tensor that is like it."""

_LEAST = 256 << 10
"""Bytes of whole pages that are worth a mapping: for fewer it takes longer than a copy."""
_MOST = 4096
"""Pieces that are borrowed at most: each takes two mappings, for good, of which a process may have some 65,000."""
_CACHED = 0.99
"""Share of a piece from which on it counts as cached: a look at a long one is a look at some of its pages."""


def borrow(plan: Plan, storage: Storage, wanted: Collection[str]) -> Borrowed | None:
    """Return memory for those of the `wanted` parameters that lie in the page cache as they do in memory.

    None where there are no such, or this system cannot do it. Files are leased from then on; nothing is read, and no
    parameter is touched.
    """
    if not can_borrow() or not isinstance(storage, SupportsUncached):
        return None
    found = paged(plan, wanted, page=PAGE, least=_LEAST)
    with ExitStack() as if_unused:
        made = if_unused.enter_context(Borrowed(storage, plan))
        left = _MOST
        for name in sorted(found, key=lambda name: _mean_length(found[name]), reverse=True):
            runs = found[name].runs
            with suppress(TensorferryError):  # whoever reads says it better
                if len(runs) <= left and _are_cached(storage, runs) and made.add(name, found[name]):
                    left -= len(runs)
        if left == _MOST:
            return None
        if_unused.pop_all()
    return made


class BorrowingExecutor:
    """Has parameters lie where memory is borrowed for them; `others` fills the rest of them, and all others.

    adopt: called for each parameter before it is written to.
    """

    def __init__(self, others: Executor, borrowed: Borrowed, adopt: Adopt) -> None:
        self._others, self._borrowed, self._adopt = others, borrowed, adopt

    def run(
        self,
        schedule: Schedule,
        storage: Storage,
        parameters: Parameters,
        *,
        on_ready: OnReady | None = None,
        progress: Progress = SILENT,
    ) -> Counters:
        """Fill `parameters`; see `Executor`. schedule: of what is not borrowed."""
        borrowed, brought = self._borrowed, Counters()
        pieces = borrowed.pieces
        waits = Counter(piece.parameter for piece in pieces)
        waits.update(schedule.plan.steps[task.step].parameter for batch in schedule.batches for task in batch.tasks)
        for name, tensor in borrowed.tensors.items():
            self._adopt(name, tensor)
            if parameters[name].data_ptr() != tensor.data_ptr():
                raise PlanError(
                    f"{name} is not the parameter any more that it was when the load was planned: plan again"
                )
        progress.start(borrowed.nbytes, "weights in the page cache")
        try:
            for piece in pieces:
                with reading_for([piece.parameter]):
                    borrowed.bring(piece)
                progress.advance(piece.length)
                brought.came("cached: borrowed", piece.length)
                brought.reads += 1
                waits[piece.parameter] -= 1
                if not waits[piece.parameter] and on_ready is not None:
                    on_ready(piece.parameter)
        finally:
            progress.finish()
        brought.bytes_read = brought.direct_bytes = borrowed.nbytes
        borrowed.hand_over()
        if schedule.batches:
            counters = self._others.run(schedule, storage, parameters, on_ready=on_ready, progress=progress)
            brought.staging_peak = counters.staging_peak
            brought.absorb(counters)
        return brought


def _mean_length(found: Paged) -> int:
    return sum(run.length for run in found.runs) // len(found.runs)


def _are_cached(cache: SupportsUncached, runs: Collection[PlainRun]) -> bool:
    """Whether runs are in the page cache, and lie on a disk of this machine: elsewhere nobody waits for a lease."""
    near = not any(cache.uncached(file).why for file in {run.file for run in runs})
    return near and all(cache.cached_share(run.file, run.start, run.length) >= _CACHED for run in runs)
